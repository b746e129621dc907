"""The decoupled schedule where ranks differ: who saves, who is late, who used what; and what it moves."""

import math
import time

import cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


def _norms(rank, size):
    """The norm against torch's on the averages; the clipped update of each."""
    worst = 0.0
    for norm_type in (1.0, 2.0, float("inf")):
        coupled, net = cases.model(), cases.model()
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (coupled, net)]
        syncs = [tw.attach(m, o, name) for m, o, name in zip((coupled, net), optimizers, ("ssgd", "dear"))]
        for step in range(3):
            for m, o in zip((coupled, net), optimizers):
                o.zero_grad()
                cases.loss_of(m, rank, step).backward()
            wanted = nn.utils.clip_grad_norm_(coupled.parameters(), 0.05, norm_type)
            norm = syncs[1].clip_grad_norm_(0.05, norm_type)
            worst = max(worst, abs(float(norm / wanted) - 1))
            for o in optimizers:
                o.step()
        for sync in syncs:
            sync.close()
        torch.testing.assert_close(cases.weights(net), cases.weights(coupled), rtol=1e-5, atol=1e-7)
        with tw.attach(
            net, optimizers[1], tw.ACP(rank=2, min_rate=1.0, decoupled=True), start_compression_step=0
        ) as sync:
            cases.loss_of(net, rank, 0).backward()
            if norm_type != 2.0:
                with pytest.raises(ValueError, match="type 2"):
                    sync.clip_grad_norm_(0.05, norm_type)
                continue
            norm = float(sync.clip_grad_norm_(1e9))
            before = cases.weights(net)
            optimizers[1].step()
            sync.synchronize()
            applied = torch.cat([(a - b).flatten() for a, b in zip(before, net.parameters())])
            assert norm == pytest.approx(float(applied.detach().norm()), rel=1e-4)
    return worst


def test_the_norm_is_torchs():
    assert max(run(_norms, 2)) < 1e-6


def _save(rank, size, path):
    net = cases.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with tw.attach(net, optimizer, "dear", fusion="none") as sync:
        for step in range(3):
            cases.down(cases.loss_of(net, rank, step), optimizer)
            if rank == 0:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
            dist.barrier()
            assert (sync.pending == ()) == (rank == 0)
        tw.checkpoint.save(f"{path}.d", net, optimizer, sync, 3)
        optimizer.zero_grad()
        cases.loss_of(net, rank, 7).backward()
        optimizer.step()
        found = tw.checkpoint.load(f"{path}.d", net, optimizer, sync)
        assert found == 3
        assert sync.pending == ()
        saved = torch.load(path)["model"]
        torch.testing.assert_close(dict(net.state_dict()), dict(saved), rtol=0, atol=0)
    return cases.weights(net)


def test_rank_0_saves_alone(tmp_path):
    a, b = run(_save, 2, str(tmp_path / "model.pt"))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def _hurried(rank, size):
    """Random delays in every forward, at every gradient; the order of what is issued is compared in each step."""
    net = cases.model(width=4, depth=2)
    draw = torch.Generator().manual_seed(rank)
    pause = lambda *_: time.sleep(float(torch.rand((), generator=draw)) * 0.002)  # noqa: E731
    for module in net:
        module.register_forward_pre_hook(pause)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(pause)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tw.attach(net, optimizer, "dear", fusion="none", detect_desync=True):
        for step in range(80):
            cases.loss_of(net, rank, step, width=4).backward()
            pause()
            optimizer.step()
            optimizer.zero_grad()
    return cases.weights(net)


def test_delays_do_not_mix_anything_up():
    a, b, c = run(_hurried, 3, seconds=250)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(a, c, rtol=0, atol=0)


def _loopback_bytes():
    with open("/proc/net/dev") as table:
        return next(int(line.split(":")[1].split()[8]) for line in table if line.strip().startswith("lo:"))


def _traffic(rank, size):
    """What one reduce-scatter of N bytes per rank sends over the loopback, all ranks together."""
    tensor = torch.zeros(3 << 20)
    net = nn.Linear(2, 2)
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "ssgd") as sync:

        def program():
            yield tw.program.ReduceScatter(tensor)

        sync.services.run(program())
        least = torch.tensor(math.inf)
        while not least < (size - 1) * 1.02:  # others may use the interface too
            dist.barrier()
            before = _loopback_bytes()
            dist.barrier()
            sync.services.run(program())
            dist.barrier()
            least = torch.tensor((_loopback_bytes() - before) / tensor.nbytes).minimum(least)
            dist.broadcast(least, 0)
        return float(least)


@pytest.mark.parametrize("size", [2, 3])
def test_a_reduce_scatter_moves_what_it_must(size):
    moved = run(_traffic, size)[0]
    assert size - 1 <= moved < (size - 1) * 1.02


def _timeline(rank, size, path):
    """A model of two layers of 2 MiB, one bucket each; the first computes until the second's exchange is through."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(720, 720), nn.Linear(720, 720))
    watched = {}

    def beside(name):
        def compute(*_):
            while name in watched and not any((e.name, e.bucket) == (name, 0) for e in watched[name].events):
                time.sleep(0.001)

        return compute

    net[0].register_forward_hook(beside("AllGather"))
    net[0].register_full_backward_hook(beside("ReduceScatter"))
    x = torch.randn(2, 720, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tw.attach(net, optimizer, "dear", plan=tw.Plan.of([["1.bias", "1.weight"], ["0.bias", "0.weight"]])) as sync:
        for _ in range(2):
            cases.down(net(x).sum(), optimizer)
        with sync.trace(path) as recorder:
            marks = {}
            net[0].register_forward_hook(lambda *_: marks.update({"first layer": recorder.now()}))
            watched["ReduceScatter"] = recorder
            cases.down(net(x).sum(), optimizer)
            stepped = recorder.now()
            watched["AllGather"] = recorder
            net(x).sum().backward()
        events = recorder.events
    gathered = [e for e in events if e.name == "AllGather" and e.start_seconds < marks["first layer"]]
    scattered = [e for e in events if e.name == "ReduceScatter" and e.start_seconds < stepped]
    backward = next(e for e in events if e.name == "backward")
    assert [e.bucket for e in gathered] == [1, 0]  # the bucket of layer 1 before layer 0 is through
    assert scattered[0].bucket == 0
    assert (
        scattered[0].start_seconds + scattered[0].duration_seconds < backward.start_seconds + backward.duration_seconds
    )


def test_both_halves_run_beside_compute(tmp_path):
    run(_timeline, 2, str(tmp_path / "trace.json"))
