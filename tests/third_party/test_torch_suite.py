"""What passes of torch's own DDP tests passes with ``ddp_hook`` in every DDP, and with ``attach`` in DDP's place.

TABLE says which do not, and what they ask for.
"""

import re

import pytest
import torch
import torch_suite
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

TELLING = {
    "hook": [
        "test_DistributedDataParallelCPU",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_ddp_join_model_equivalence",
        "test_static_graph_multi_forward",
    ],
    "attach": [
        "test_DistributedDataParallelCPU",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_ddp_broadcast_buffer",
        "test_ddp_ignore_params_arg",
        "test_static_graph_multi_forward",
    ],
}
HOURS = "test_ddp_uneven_inputs"  # hundreds of passes through convolutions of 1000 x 1000
HALF = "test_ddp_grad_div_uneven_inputs"  # the hook refuses it on one rank alone: see below
LEFT_OUT = {"hook": [HOURS, HALF], "attach": [HOURS]}

# What a test says that does not pass. It asks for what is DDP's own, ...
OWN_HOOK = "register_comm_hook or register_builtin_comm_hook can only be called once"
LOGGED = "thinwire_hook is not None"
SKIPS = "a hook cannot know which ranks to wait for"
HOOKS = "no attribute 'register_comm_hook'"
JOIN = "no attribute 'join'"
EVENTS = "Expected 6 but got"  # of Gloo's all-reduce, but gradients go over connections of thinwire's own
DEPRECATED = "0 not greater than 0"  # warnings about DDP's broadcast_buffers
# ... for an error where ``attach`` needs none (what_differs_from_ddp.md), ...
UNUSED = " error (was )?not raised"  # parameters that no rank used
STATIC = "RuntimeError not raised"  # a graph that was promised to be static, and is not
# ... or for an error of another class.
CLASS = "ValueError: the model has no trainable parameter"
PASSES = "^ok$"
TABLE = {  # of all that pass plain on a CPU: what they come to with ``ddp_hook``, and with ``attach``; None: not tried
    "test_DistributedDataParallelCPU": (PASSES, PASSES),
    "test_DistributedDataParallelCPU_grad_is_view": (PASSES, PASSES),
    "test_DistributedDataParallel_requires_grad": (PASSES, CLASS),
    "test_ddp_zero_output_features": (PASSES, PASSES),
    "test_ddp_create_graph": (PASSES, PASSES),
    "test_ddp_comm_hook_logging": (LOGGED, "no attribute '_get_ddp_logging_data'"),
    "test_get_data_parallel_params": (PASSES, PASSES),
    "test_ddp_native_mixed_precision_ignored_params": (OWN_HOOK, "argument 'mixed_precision'"),
    "test_ddp_hook_parity_allreduce": (OWN_HOOK, HOOKS),
    "test_ddp_hook_parity_allreduce_process_group": (OWN_HOOK, HOOKS),
    "test_ddp_hook_parity_powerSGD": (OWN_HOOK, HOOKS),
    "test_ddp_hook_parity_post_localSGD": (OWN_HOOK, HOOKS),
    "test_accumulate_gradients_no_sync": (PASSES, PASSES),
    "test_accumulate_gradients_no_sync_grad_is_view": (PASSES, PASSES),
    "test_accumulate_gradients_no_sync_allreduce_hook": (OWN_HOOK, HOOKS),
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": (OWN_HOOK, HOOKS),
    "test_DistributedDataParallel_with_amp_and_grad_is_view": (PASSES, PASSES),
    "test_post_localSGD_optimizer_parity": (PASSES, PASSES),
    "test_post_localSGD_optimizer_parity_grad_is_view": (PASSES, PASSES),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": (PASSES, PASSES),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": (PASSES, PASSES),
    "test_post_localSGD_optimizer_step_reload": (PASSES, PASSES),
    "test_ddp_logging_data_cpu": (PASSES, "no attribute '_set_ddp_runtime_logging_sample_rate'"),
    "test_ddp_bucket_cap_mb_list": (PASSES, "argument 'bucket_cap_mb_list'"),
    "test_static_graph_api_cpu": (PASSES, STATIC),
    "test_ddp_sync_module_states": (PASSES, "no attribute 'process_group'"),
    "test_ddp_grad_div_uneven_inputs": (None, JOIN),
    "test_ddp_profiling_torch_profiler": (EVENTS, EVENTS),
    "test_ddp_join_model_equivalence": (PASSES, JOIN),
    "test_ddp_uneven_input_join_disable": (PASSES, JOIN),
    "test_ddp_uneven_input_exception": (PASSES, JOIN),
    "test_ddp_ignore_params_arg": (PASSES, PASSES),
    "test_ddp_unused_params_rebuild_buckets_exception": (PASSES, UNUSED),
    "test_ddp_shared_grad_acc_unused_params": (PASSES, PASSES),
    "test_ddp_namedtuple": (PASSES, PASSES),
    "test_grads_same_across_ranks_with_no_sync": (PASSES, PASSES),
    "test_ddp_control_flow_same_across_ranks": (PASSES, "no attribute 'reducer'"),
    "test_invalid_static_graph": (PASSES, STATIC),
    "test_ddp_control_flow_different_across_ranks": (PASSES, "no attribute 'reducer'"),
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger": (PASSES, PASSES),
    "test_verify_model_across_rank_with_logger": (PASSES, PASSES),
    "test_verify_model_across_rank_without_logger": (PASSES, PASSES),
    "test_ddp_model_diff_num_params_across_ranks": (PASSES, PASSES),
    "test_output_unused_in_loss_tuple_module": (PASSES, PASSES),
    "test_output_unused_in_loss_dict_module": (PASSES, PASSES),
    "test_undefined_grad_parity_unused_parameters": (PASSES, PASSES),
    "test_different_graph_across_ranks": (PASSES, "no attribute '_get_ddp_logging_data'"),
    "test_ddp_build_debug_param_to_name_mapping": (PASSES, "no attribute '_build_params_for_reducer'"),
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": (PASSES, "no attribute '_build_params_for_reducer'"),
    "test_ddp_multiple_nested_unused_params_error": (PASSES, UNUSED),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": (PASSES, UNUSED),
    "test_ddp_python_error_logged": (PASSES, HOOKS),
    "test_ddp_static_graph_nested_types": (PASSES, PASSES),
    "test_ddp_returns_tensor_with_no_grad": (PASSES, PASSES),
    "test_detect_ddp_is_actually_static": (PASSES, "no attribute 'reducer'"),
    "test_ddp_new_tensor_in_fwd": (PASSES, PASSES),
    "test_ddp_new_tensor_in_fwd_static_graph": (PASSES, PASSES),
    "test_ddp_buffer_hook_allreduce_return_future": (PASSES, "no attribute '_register_buffer_comm_hook'"),
    "test_ddp_buffer_hook_allreduce": (PASSES, "no attribute '_register_buffer_comm_hook'"),
    "test_ddp_broadcast_buffer_via_hook": (PASSES, "no attribute '_register_buffer_comm_hook'"),
    "test_ddp_remove_autograd_hooks": (PASSES, "no attribute '_remove_autograd_hooks'"),
    "test_ddp_broadcast_buffer": (PASSES, PASSES),
    "test_ddp_join_respects_forward_sync_buffers_false": (PASSES, JOIN),
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": (PASSES, PASSES),
    "test_ddp_broadcast_buffers_deprecation_warning": (PASSES, DEPRECATED),
    "test_static_graph_multi_forward": (PASSES, PASSES),
    "test_stateless_api_with_ddp": (PASSES, PASSES),
    "test_ddp_forward_backward_hook": (PASSES, PASSES),
    "test_ddp_device_mesh_initialization": (PASSES, "argument 'device_mesh'"),
    "test_ddp_compile_static_graph": (PASSES, PASSES),
    "test_ddp_sink_noclone": (PASSES, "no attribute '_set_ddp_sink_clone'"),
    "test_skip_all_reduce_unused_parameters": (SKIPS, "argument 'skip_all_reduce_unused_params'"),
}


def _play(folder, wanted, seconds):
    pytest.importorskip("expecttest", reason="torch's own tests import expecttest, which is not installed")
    found = run(torch_suite.play, 2, str(folder), wanted, LEFT_OUT, fresh=True, init=False, seconds=seconds)[0]
    if isinstance(found, str):
        pytest.skip(f"torch {torch.__version__} cannot import its own tests: {found}")
    return found


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    return _play(tmp_path_factory.mktemp("suite"), TELLING, 150)


@pytest.mark.parametrize("way, name", [(way, name) for way, names in TELLING.items() for name in names])
def test_telling_ones(way, name, telling):
    assert telling[name]["plain"] == telling[name][way] == ["ok", "ok"], telling[name][way][0]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return _play(tmp_path_factory.mktemp("all"), None, 1100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place, way", enumerate(["hook", "attach"]))
def test_all(place, way, everything):
    passed, wrong = set(), []
    for name, outcomes in everything.items():
        if outcomes["plain"] != ["ok", "ok"] or way not in outcomes:
            continue
        expected = TABLE.get(name, ("not in TABLE",) * 2)[place]
        if all(re.search(expected, text) for text in outcomes[way]):
            passed |= {name} if expected == PASSES else set()
        else:
            wrong.append(f"{name}, expected {expected}: {outcomes[way][0]}\n{outcomes[way][1]}")
    assert not wrong, "\n\n".join(wrong)
    assert len(passed) >= (50, 30)[place]  # else the tests are not what they were, or all are skipped
    assert set(TELLING[way]) <= passed


def _divisor(rank, size):
    ddp = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    state, hook = tw.ddp_hook("ssgd")
    ddp.register_comm_hook(state, hook)
    try:
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(2 + rank):
                ddp(torch.ones(1, 5)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        state.close()


def test_join_that_divides_by_the_ranks_still_there_is_refused():
    first, second = run(_divisor, 2, fresh=True)
    assert first.startswith("join(divide_by_initial_world_size=False) has no effect on a communication hook")
    assert "rank 0" in second
