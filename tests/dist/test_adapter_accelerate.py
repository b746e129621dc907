"""A loop with Accelerate and ``register_comm_hook``: the numbers of ``attach``, through ``save_state``."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_cases import (
    ACCUMULATE,
    CLIP,
    LOCALS,
    LR,
    METHODS,
    MOMENTUM,
    ROWS,
    SMALL,
    Net,
    Points,
    check,
    check_misuse,
    compared,
    forget,
    locally_compared,
    misuse,
    quiet_rank,
    run_block,
    sentence,
    without_launcher,
)  # fmt: skip

from spawned import run

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed"),
]

STEPS = 4


def _accelerator(**options):
    """A new one, also where this process had one already."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    forget()
    buckets = DistributedDataParallelKwargs(bucket_cap_mb=SMALL, **options)
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, kwargs_handlers=[buckets])


def _prepared(accelerator):
    net = Net()
    loader = torch.utils.data.DataLoader(Points(STEPS), batch_size=ROWS)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    return net, *accelerator.prepare(net, optimizer, loader)


def _epoch(accelerator, model, optimizer, loader):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def _trained(folder, method, options):
    """An epoch, ``save_state``; another accelerator and model ``load_state`` and go on for a second epoch."""
    from thinwire.adapters.accelerate import register_comm_hook

    fed, losses = [], []
    for epoch in range(2):
        accelerator = _accelerator()
        net, model, optimizer, loader = _prepared(accelerator)
        sync = register_comm_hook(accelerator, model, method, **options)
        if epoch:
            accelerator.load_state(str(Path(folder, method)))
        _epoch(accelerator, model, optimizer, loader)
        if not epoch:
            accelerator.save_state(str(Path(folder, method)))
        fed += net.fed
        losses += net.losses
    return compared(net, sync, fed, losses, method, options)


def _trained_locally(rank, folder, method, options):
    """As above, under local steps; in the second half nobody has loaded anything before ``load_state``."""
    from safetensors.torch import load_file

    from thinwire.adapters.accelerate import register_comm_hook

    fed, losses, at = [], [], str(Path(folder, f"{method} locally"))
    for epoch in range(2):
        accelerator = _accelerator()
        net, model, optimizer, loader = _prepared(accelerator)
        sync = register_comm_hook(accelerator, model, method, optimizer=optimizer, **options)
        if epoch:
            accelerator.load_state(at)
        _epoch(accelerator, model, optimizer, loader)
        if not epoch:
            accelerator.save_state(at)
            _epoch(accelerator, model, optimizer, loader)  # else what is still under way would be waited for
            net.fed, net.losses = net.fed[: STEPS * ACCUMULATE], net.losses[: STEPS * ACCUMULATE]
            sync.close()
        fed += net.fed
        losses += net.losses
    sync.finish()
    found = load_file(Path(at, "model.safetensors"))
    saved = [found[name] for name, _ in net.named_parameters()]
    result = locally_compared(net, sync, fed, losses, method, options, saved=saved, at=STEPS, seen=[])
    sync.close()
    return result


def _against_accelerates_own():
    """Its LocalSGD, which averages every few steps and at the end; ours beside it."""
    from accelerate.local_sgd import LocalSGD

    from thinwire.adapters.accelerate import register_comm_hook

    weights = []
    for ours in (False, True):
        accelerator = _accelerator()
        net, model, optimizer, loader = _prepared(accelerator)
        if ours:
            sync = register_comm_hook(
                accelerator, model, "local", optimizer=optimizer, sync_every=3, codec=None, fragment_sync_delay=0
            )
            _steps(accelerator, model, optimizer, loader)
            sync.finish()
            sync.close()
        else:
            with LocalSGD(accelerator, model, local_sgd_steps=3) as local_sgd:
                _steps(accelerator, model, optimizer, loader, local_sgd.step)
        weights.append([p.detach().clone() for p in net.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _steps(accelerator, model, optimizer, loader, every=lambda: None):
    for x, y in loader:
        accelerator.backward(model(x, y)["loss"])
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()
        every()


def _back_to_ddp(rank):
    """After ``close`` DDP averages again."""
    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = _accelerator()
    _, model, optimizer, _ = _prepared(accelerator)
    sync = register_comm_hook(accelerator, model, "local", optimizer=optimizer)
    for _ in range(2):
        model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
        model.require_backward_grad_sync = True  # as trigger_sync_in_backward does: each keeps its own all the same
    apart = next(model.parameters()).grad.clone()
    optimizer.optimizer.zero_grad()
    sync.close()
    model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
    none = sentence(lambda: register_comm_hook(accelerator, model, "local"))
    needless = sentence(lambda: register_comm_hook(accelerator, model, "acp", optimizer=optimizer))
    return apart.numpy(), next(model.parameters()).grad.numpy(), none, needless


def _refused(rank, folder):
    """States of which a part is missing: rank 1's file; all (a folder of plain DDP). The model has a hook."""
    from accelerate.utils import DDPCommunicationHookType

    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = _accelerator()
    _, model, _, _ = _prepared(accelerator)
    accelerator.save_state(str(Path(folder, "plain")))
    sync = register_comm_hook(accelerator, model, "acp", rank=2)
    second = sentence(lambda: register_comm_hook(accelerator, model, "ssgd"))
    accelerator.load_state(str(Path(folder, "plain")))
    accelerator.save_state(str(Path(folder, "cut")))
    accelerator.wait_for_everyone()
    if rank == 1:
        Path(folder, "cut", "thinwire_rank1.pt").unlink()
    accelerator.wait_for_everyone()
    for _ in range(4):
        model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
    owed = float(sum(x.norm() for x in sync.state.residuals.values()))
    accelerator.load_state(str(Path(folder, "cut")))
    occupied = _accelerator(comm_hook=DDPCommunicationHookType.FP16)
    _, theirs, _, _ = _prepared(occupied)
    both = sentence(lambda: register_comm_hook(occupied, theirs, "ssgd"))
    bare = sentence(lambda: register_comm_hook(accelerator, Net(), "ssgd"))
    wrong = sentence(lambda: register_comm_hook(model, accelerator, "ssgd"))
    return second, both, bare, wrong, owed, float(sum(x.norm() for x in sync.state.residuals.values()))


def _main_process_only(rank, folder, method):
    """A script that saves under ``if is_main_process``, at a rate that NumPy computed."""
    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = _accelerator()
    net, model, optimizer, _ = _prepared(accelerator)
    given = {"optimizer": optimizer, "sync_every": 2} if method == "local" else {}
    sync = register_comm_hook(accelerator, model, method, **given)
    for group in optimizer.param_groups if method == "local" else ():
        group["lr"] = np.float64(0.01)  # Accelerate's own file, with plain DDP, is then one that torch refuses
    for step in range(5):
        accelerator.backward(model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:  # local steps: after a round
            weights = [p.detach().clone() for p in net.parameters()]
            if accelerator.is_main_process:
                accelerator.save_state(str(Path(folder, f"main only {method}")))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(Path(folder, f"main only {method}")))
    sync.close()
    return all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))


def _two_models(folder):
    """Each has its own hook and its own files."""
    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = _accelerator()
    models = [accelerator.prepare(Net()) for _ in range(2)]
    syncs = [register_comm_hook(accelerator, model, "topk", density=0.1, start_compression_step=0) for model in models]
    for scale, model in enumerate(models, start=1):
        for x, y in [(torch.ones(2, 24), scale * torch.ones(2, 5))]:
            accelerator.backward(model(x, y)["loss"])
    accelerator.save_state(str(Path(folder, "pair")))
    owed = [{name: x.clone() for name, x in sync.state.residuals.items()} for sync in syncs]
    for sync in syncs:
        for x in sync.state.residuals.values():
            x.zero_()
    accelerator.load_state(str(Path(folder, "pair")))
    back = all(torch.equal(x, sync.state.residuals[n]) for sync, old in zip(syncs, owed) for n, x in old.items())
    return back, any(not torch.equal(owed[0][name], owed[1][name]) for name in owed[0])


@quiet_rank()
def _everything(rank, size, folder):
    found = {
        "trained": {method: _trained(folder, method, options) for method, options in METHODS.items()},
        "local": {method: _trained_locally(rank, folder, method, options) for method, options in LOCALS.items()},
        "their LocalSGD": _against_accelerates_own(),
        "ddp": _back_to_ddp(rank),
        "refused": _refused(rank, folder),
        "pair": _two_models(folder),
        "main only": [_main_process_only(rank, folder, method) for method in ("ssgd", "local")],
        "files": sorted(os.listdir(Path(folder, "acp"))),
    }
    accelerator = _accelerator()
    found["misuse"] = misuse("accelerate", lambda m, method, **o: m.register_comm_hook(accelerator, Net(), method, **o))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def two(folder):
    return run(_everything, 2, folder, seconds=250)


@pytest.mark.parametrize("method", METHODS)
def test_equals_attach_also_after_a_resume(two, method):
    """With accumulation and clipping, in several buckets, over ``save_state`` and ``load_state``; bit for bit."""
    for result in two:
        check(result["trained"][method], method, 2 * STEPS)


@pytest.mark.parametrize("method", LOCALS)
def test_local_steps_equal_attach_also_after_a_resume(two, method):
    for result in two:
        assert all(result["local"][method].values()), result["local"][method]


def test_local_steps_equal_accelerates_own(two):
    assert [result["their LocalSGD"] for result in two] == [True, True]


def test_ddp_averages_when_local_steps_have_ended_and_not_before(two):
    (apart, after, none, needless), (other, after_there, *_) = (result["ddp"] for result in two)
    assert not (apart == other).all()
    assert (after == after_there).all()
    assert none.startswith("ValueError: local steps are counted by the optimizer's")
    assert needless.startswith("ValueError: optimizer= is for local steps")


def test_every_rank_has_a_file_beside_accelerates(two):
    assert {"thinwire_rank0.pt", "thinwire_rank1.pt", "model.safetensors"} <= set(two[0]["files"])


def test_what_does_not_fit_is_refused_on_all_ranks(two):
    for result in two:
        second, both, bare, wrong, owed, after = result["refused"]
        assert "already has a communication hook" in second
        assert "already has a communication hook" in both
        assert "choose plain DDP" in bare
        assert wrong.startswith("TypeError: register_comm_hook takes the Accelerator first")
        assert owed > 0.0
        assert after == 0.0  # as in a script that saves on the main process only


def test_what_the_main_process_alone_has_saved_can_be_loaded(two):
    assert [result["main only"] for result in two] == [[True, True]] * 2


def test_two_models_keep_apart(two):
    for result in two:
        assert result["pair"] == (True, True)


def test_bad_options_are_refused_at_once(two):
    for result in two:
        check_misuse(result["misuse"])


@quiet_rank()
def _alone(rank, size, folder):
    """One rank goes on from the state of two."""
    from thinwire.adapters.accelerate import register_comm_hook

    without_launcher()
    accelerator = _accelerator()
    net, model, optimizer, loader = _prepared(accelerator)
    sync = register_comm_hook(accelerator, model, "acp", rank=2)
    accelerator.load_state(str(Path(folder, "acp")))
    _epoch(accelerator, model, optimizer, loader)
    accelerator.save_state(str(Path(folder, "alone")))
    return sync.stats(), net.losses


def test_one_rank_sends_nothing(two, folder):
    ((stats, losses),) = run(_alone, 1, folder, init=False)
    assert (stats.bytes_sent, stats.world_size) == (0, 1)
    assert "acp runs as ssgd" in stats.note
    assert len(losses) == 2 * STEPS * ACCUMULATE


@quiet_rank()
def _more(rank, size, folder):
    """Three ranks go on from the files of two: each gets the mean of what they owed."""
    from thinwire.adapters.accelerate import register_comm_hook

    accelerator = _accelerator()
    _, model, _, _ = _prepared(accelerator)
    sync = register_comm_hook(accelerator, model, "acp", rank=2)
    accelerator.load_state(str(Path(folder, "acp")))
    old = [torch.load(Path(folder, "acp", f"thinwire_rank{r}.pt"), weights_only=True)["state"] for r in range(2)]
    return {
        name: (x.numpy(), ((old[0][f"residual/0/{name}"] + old[1][f"residual/1/{name}"]) / 2).numpy())
        for name, x in sync.state.residuals.items()
    }


@quiet_rank()
def _more_locally(rank, size, folder):
    """Another number of ranks begins from the outer weights, after what was under way."""
    from thinwire.adapters.accelerate import register_comm_hook

    without = size == 1
    if without:
        without_launcher()
    accelerator = _accelerator()
    net, model, optimizer, loader = _prepared(accelerator)
    sync = register_comm_hook(accelerator, model, "diloco", optimizer=optimizer, **LOCALS["diloco"])
    accelerator.load_state(str(Path(folder, "diloco locally")))
    own = [p.detach().clone() for p in net.parameters()]
    with sync.outer_weights():
        outer = [p.detach().clone() for p in net.parameters()]
    _epoch(accelerator, model, optimizer, loader)
    sync.finish()
    sync.close()
    return [x.numpy() for x in own], [x.numpy() for x in outer], [p.detach().numpy() for p in net.parameters()]


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_begins_from_the_outer_weights(two, folder, size):
    ranks = run(_more_locally, size, folder, init=size > 1)
    for own, outer, ended in ranks:
        for row, at_first, a, b, c, d in zip(own, ranks[0][0], own, outer, ended, ranks[0][2]):
            assert (row == at_first).all()
            assert (a == b).all()
            assert (c == d).all()
            assert not (a == c).all()


@pytest.mark.slow
def test_another_number_of_ranks_gets_the_mean(two, folder):
    for found in run(_more, 3, folder):
        assert found
        assert all((got == mean).all() and mean.any() for got, mean in found.values())


@quiet_rank()
def _page(rank, size, folder, block="accelerate"):
    return run_block(block, folder).sync.stats()


def test_the_page_runs_on_two_ranks(tmp_path):
    for stats in run(_page, 2, str(tmp_path), init=False):
        assert stats.method == "acp"
        assert 0 < stats.bytes_sent < stats.dense_bytes
    assert (tmp_path / "checkpoint" / "thinwire_rank1.pt").exists()


def test_the_page_runs_on_two_ranks_under_local_steps(tmp_path):
    for stats in run(_page, 2, str(tmp_path), "accelerate_local", init=False):
        assert stats.method == "local"
        assert 0 < stats.bytes_sent < stats.dense_bytes / 2
    assert (tmp_path / "checkpoint" / "thinwire_rank1.pt").exists()


def test_without_accelerate_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "thinwire.adapters.accelerate", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'thinwire\[accelerate\]'"):
        importlib.import_module("thinwire.adapters.accelerate")
