"""What passes of torch's own DDP tests passes with ``ddp_hook("ssgd")`` in every DDP too."""

import pytest
import torch
import torch_suite
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

TELLING = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_join_model_equivalence",
    "test_static_graph_multi_forward",
]
OWN_HOOK = "register_comm_hook or register_builtin_comm_hook can only be called once"
OTHERWISE = {  # tests that cannot pass with a hook: what they then say
    "test_accumulate_gradients_no_sync_allreduce_hook": OWN_HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": OWN_HOOK,
    "test_ddp_apply_optim_in_backward": OWN_HOOK,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": OWN_HOOK,
    "test_ddp_apply_optim_in_backward_ignored_params": OWN_HOOK,
    "test_ddp_hook_parity_allreduce": OWN_HOOK,
    "test_ddp_hook_parity_allreduce_process_group": OWN_HOOK,
    "test_ddp_hook_parity_post_localSGD": OWN_HOOK,
    "test_ddp_hook_parity_powerSGD": OWN_HOOK,
    "test_ddp_native_mixed_precision_ignored_params": OWN_HOOK,
    # It reads from DDP's log that there is no hook yet.
    "test_ddp_comm_hook_logging": "thinwire_hook is not None",
    # It counts the profiler's events of Gloo's all-reduce, but gradients go over connections of thinwire's own.
    "test_ddp_profiling_torch_profiler": "Expected 6 but got",
}
LEFT_OUT = {
    "test_ddp_uneven_inputs": "hundreds of passes through convolutions of 1000 x 1000, hours on a CPU",
    "test_ddp_grad_div_uneven_inputs": "the hook refuses it on one rank alone: see below",
    "test_skip_all_reduce_unused_parameters": "DDP leaves out a whole bucket, and a hook that waits for it is not told",
}


def _play(folder, wanted, seconds):
    pytest.importorskip("expecttest", reason="torch's own tests import expecttest, which is not installed")
    found = run(torch_suite.play, 2, str(folder), wanted, list(LEFT_OUT), fresh=True, init=False, seconds=seconds)[0]
    if isinstance(found, str):
        pytest.skip(f"torch {torch.__version__} cannot import its own tests: {found}")
    return found


@pytest.mark.parametrize("name", TELLING)
def test_telling_ones(name, telling):
    plain, hooked = telling[name]
    assert plain == hooked == ["ok", "ok"], hooked[0]


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    return _play(tmp_path_factory.mktemp("suite"), TELLING, 150)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all(tmp_path):
    found = _play(tmp_path, None, 1100)
    passed, wrong = [], {}
    for name, outcomes in found.items():
        if outcomes[0] != ["ok", "ok"]:
            continue  # plain too
        if name in OTHERWISE:
            if not any(OTHERWISE[name] in text for text in outcomes[1]):
                wrong[name] = outcomes[1]
        elif outcomes[1] == ["ok", "ok"]:
            passed.append(name)
        else:
            wrong[name] = outcomes[1]
    assert not wrong, "\n\n".join(f"{name}: {texts[0]}\n{texts[1]}" for name, texts in wrong.items())
    assert len(passed) >= 40  # else the tests are not what they were, or all are skipped
    assert set(TELLING) <= set(passed)


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
