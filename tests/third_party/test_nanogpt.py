"""nanoGPT's loop: accumulation, a loss scale, clipping, a learning rate by hand; rank 0 alone evaluates and saves."""

import inspect
import math
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from loops import GPT, LOSSY, WAYS, Trail, Wire, assert_equal, assert_ranks_equal, assert_trains, both, text

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

STEPS, EVERY, ACCUMULATION, LENGTH, BATCH = 24, 8, 2, 32, 8
RATE, WARMUP = 2e-2, 4


def _rate(step):
    """Up in a line, down along a cosine to a tenth."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def _batch(data, rank, number):
    draw = torch.Generator().manual_seed(7919 * number + rank)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw).tolist()
    rows = [torch.stack([data[i + shift : i + shift + LENGTH] for i in starts]) for shift in (0, 1)]
    return rows[0], rows[1]


def _optimizer(model):
    """Matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), **({"fused": True} if fused else {}))


@torch.no_grad()
def _evaluate(net, data):
    net.eval()
    loss = sum(float(net(*_batch(data, 99, 1000 + k))[1]) for k in range(4)) / 4
    net.train()
    return loss


def _train(
    rank, way, method="ssgd", *, first=0, last=STEPS, scaled=False, toggle=False, folder=None, owed=False, **how
):
    """Steps ``first`` to ``last``.

    Args:
        toggle: accumulate by the flag that DDP has on its module, as nanoGPT does, rather than under ``no_sync``.
        folder: rank 0 leaves its checkpoint there before each ``EVERY`` steps, and ``first`` reads it.
        owed: what a lossy method owes is saved too.
    """
    torch.manual_seed(1337 + rank)  # other initial weights on every rank: those of rank 0 are taken over
    whole = text()
    data, held = whole[:50_000], whole[50_000:]
    model, scaler = GPT(), torch.amp.GradScaler("cpu", enabled=scaled)
    optimizer = _optimizer(model)
    trail = Trail()
    if first and not (owed and way == "attach"):
        saved = torch.load(os.path.join(folder, f"ckpt-{first}.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    how |= {"scaler": scaler} if owed else {}  # else it is found
    with Wire(way, model, optimizer, method, **how) as wire:
        if first and owed and way == "attach":
            assert tw.checkpoint.load(os.path.join(folder, "all"), model, optimizer, wire.ours) == first
        elif first and owed:
            wire.ours.load_state_dict(torch.load(os.path.join(folder, f"owed-{first}-{rank}.pt")))
        x, y = _batch(data, rank, ACCUMULATION * first)
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = _rate(step)
            if step % EVERY == 0 and rank == 0:
                trail.evaluated[step] = _evaluate(wire.net, held)
                if folder:
                    saved = {"model": wire.raw.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(saved | {"scaler": scaler.state_dict()}, os.path.join(folder, f"ckpt-{step}.pt"))
            if step == EVERY and owed and way == "attach":
                tw.checkpoint.save(os.path.join(folder, "all"), model, optimizer, wire.ours, step=step)
            elif step == EVERY and owed:
                torch.save(wire.ours.state_dict(), os.path.join(folder, f"owed-{step}-{rank}.pt"))
            total = 0.0
            for micro in range(ACCUMULATION):
                final = micro == ACCUMULATION - 1
                if toggle:
                    wire.net.require_backward_grad_sync = final
                with wire.sync_if(final or toggle):
                    loss = wire.net(x, y)[1] / ACCUMULATION
                    x, y = _batch(data, rank, ACCUMULATION * step + micro + 1)
                    scaler.scale(loss).backward()
                total = total + loss
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(wire.net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            trail.step(total, model)
        if way != "ddp":
            trail.stats.append(wire.ours.stats())
    return trail


def _exact(rank, size, scaled):
    return {
        "ddp": _train(rank, "ddp", scaled=scaled, toggle=True),
        "hook": _train(rank, "hook", scaled=scaled, toggle=True),
        "attach": _train(rank, "attach", scaled=scaled),
        "attach, toggle": _train(rank, "attach", scaled=scaled, toggle=True),
    }


@pytest.mark.parametrize("scaled", [False, True])
def test_ssgd_is_ddp(scaled):
    results = run(_exact, 2, scaled)
    for found in results:
        theirs = found["ddp"]
        assert_equal(found["hook"], theirs)
        assert_equal(found["attach"], theirs)
        assert found["attach"].evaluated == found["hook"].evaluated == theirs.evaluated
        # A flag that nothing reads: both passes are exchanged, so a sum of four is made in another order. AdamW divides
        # by what may be nearly zero, so a weight can move further by that than rounding explains; the loss does not.
        assert found["attach, toggle"].losses == pytest.approx(theirs.losses, abs=1e-3)
        assert found["attach, toggle"].stats[0].bytes_sent == ACCUMULATION * found["attach"].stats[0].bytes_sent
    assert_ranks_equal([found["attach"] for found in results])
    assert results[1]["attach"].evaluated == {}
    values = list(results[0]["attach"].evaluated.values())
    assert values[-1] < values[0] - 1


def _lossy(rank, size, way):
    return both(partial(_train, rank, scaled=True), way)


@pytest.mark.parametrize("way", WAYS)
def test_lossy_methods_train(way):
    results = run(_lossy, 2, way)
    assert_trains(results, falls=0.7, near=0.6)
    for name, trail in results[0].items():
        values = list(trail.evaluated.values())
        assert values[-1] < values[0] - 1, name


def _resumed(rank, size, folder, listed):
    pairs = []
    for number, (way, method, how) in enumerate(listed):
        place = os.path.join(folder, str(number))
        os.makedirs(place, exist_ok=True)
        kept = {"folder": place, "scaled": True, "owed": method != "ssgd", **how}
        whole = _train(rank, way, method, last=2 * EVERY, **kept)
        dist.barrier()  # rank 0 has written
        rest = _train(rank, way, method, first=EVERY, last=2 * EVERY, **kept)
        pairs.append((way, method, whole, rest))
    return pairs


RESUMED = [(way, "ssgd", {}) for way in ("ddp", "hook", "attach")]
RESUMED += [("attach", *lossy) for lossy in (*LOSSY[1::2], LOSSY[-1])]
RESUMED += [("hook", *LOSSY[1])]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    for pairs in run(_resumed, 2, str(tmp_path), RESUMED):
        for way, method, whole, rest in pairs:
            assert len(rest.weights) == EVERY
            assert whole.losses[EVERY:] == rest.losses, (way, method)
            for a, b in zip(whole.weights[EVERY:], rest.weights):
                assert torch.equal(a, b), (way, method)
