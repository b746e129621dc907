"""Sparse exchanges and DGC on real Gloo ranks: LocalWorld to the bit, torch's SGD, restarts, refusals."""

import cases
import pytest
import torch
from torch import nn

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import Costs

pytestmark = pytest.mark.dist
NAMES = [n for n, _ in cases.model().named_parameters()]
PLAN = tw.Plan.of([NAMES[4:], NAMES[:4]])
METHODS = [
    tw.TopK(0.1),
    tw.TopK(0.1, exchange="auto", select="threshold"),
    tw.GTopK(0.1),
    tw.OkTopk(0.1),
    tw.OkTopk(0.2, value_dtype="bf16"),
    tw.DGC(0.1),
    tw.DGC(0.1, nesterov=True, clip=0.5, value_dtype="fp16", select="exact"),
]


def _gradients(rank, size, steps):
    found = []
    for method in METHODS:
        net = cases.model()
        with tw.attach(
            net, None, method, keep_dense="none", plan=PLAN, detect_desync=True, start_compression_step=0
        ) as sync:
            seen = []
            for step in range(steps):
                net.zero_grad()
                cases.loss_of(net, rank, step).backward()
                seen.append({n: p.grad.clone() for n, p in net.named_parameters()})
            found.append((seen, sync.services.state.snapshot(), sync.stats().bytes_sent))
    return found


@pytest.mark.parametrize("size", [3, 4])
def test_every_exchange_equals_local_world_bit_for_bit(size):
    steps, net = 4, cases.model()
    results = run(_gradients, size, steps)
    local = []
    for step in range(steps):
        local.append([])
        for rank in range(size):
            net.zero_grad()
            cases.loss_of(net, rank, step).backward()
            local[-1].append({n: p.grad.clone() for n, p in net.named_parameters()})
    for index, method in enumerate(METHODS):
        world = tw.LocalWorld(size, plan=PLAN)
        for step in range(steps):
            wanted = world.step(method, local[step])
            for rank in range(size):
                got = results[rank][index][0][step]
                assert all(torch.equal(got[n], wanted[rank][n]) for n in NAMES), (method, step)
        for rank, state in enumerate(world.states):
            snapshot = state.snapshot()
            kept = results[rank][index][1]
            assert all(torch.equal(x, kept["residual"][n]) for n, x in snapshot["residual"].items())
            assert all(
                torch.equal(x, kept["local"][f][n]) for f in snapshot["local"] for n, x in snapshot["local"][f].items()
            )
        assert [r[index][2] for r in results] == world.bytes_sent()


OPTIONS = {"density": 1.0, "nesterov": True, "weight_decay": 0.05}


def _as_sgd(rank, size):
    """DGC at density 1, and with everything dense, beside the same average under momentum SGD."""
    nets = []
    for dense in ("auto", lambda name, parameter: True):
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, "dgc", keep_dense=dense, **OPTIONS):
            for step in range(8):
                net.zero_grad()
                cases.loss_of(net, rank, step).backward()
                optimizer.step()
        nets.append(cases.weights(net))
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05)
    with pytest.raises(ValueError, match="replace it with"):
        tw.attach(net, optimizer, "dgc")
    with tw.attach(net, optimizer, "ssgd"):
        for step in range(8):
            net.zero_grad()
            cases.loss_of(net, rank, step).backward()
            optimizer.step()
    return nets, cases.weights(net)


def test_dgc_at_density_one_is_momentum_sgd_with_decay():
    for nets, wanted in run(_as_sgd, 2):
        for net in nets:
            for a, b in zip(net, wanted):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def _build(name, options):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return net, optimizer, tw.attach(net, optimizer, name, start_compression_step=0, **options)


def _steps(net, optimizer, rank, first, last):
    for step in range(first, last):
        cases.loss_of(net, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


RESUMED = [
    ("dgc", {"density": 0.1, "weight_decay": 0.01}),
    ("dgc", {"density": 0.1, "nesterov": True, "fusion": "none"}),
    ("gtopk", {"density": 0.1}),
    ("oktopk", {"density": 0.1, "fusion": "none"}),
]


def _saved(rank, size, folder):
    net, optimizer, sync = _build(*RESUMED[0])
    _steps(net, optimizer, rank, 0, 4)
    tw.checkpoint.save(folder, net, optimizer, sync, 4)
    sync.close()
    return _own(sync)


def _own(sync):
    found = sync.services.state.snapshot()
    return {**found["local"], "residual": found["residual"]}


def _loaded(rank, size, folder):
    net, optimizer, sync = _build(*RESUMED[0])
    tw.checkpoint.load(folder, net, optimizer, sync)
    local = _own(sync)
    _steps(net, optimizer, rank, 4, 6)
    sync.close()
    return local


@pytest.mark.parametrize("old, new", [(3, 2), (2, 3)])
def test_another_world_size_gets_the_mean_momentum_and_residual(tmp_path, old, new):
    before, after = run(_saved, old, str(tmp_path)), run(_loaded, new, str(tmp_path))
    for rank in after:
        for field in ("momentum", "decay", "residual"):
            assert rank[field].keys() == before[0][field].keys()
            for name, value in rank[field].items():
                mean = sum(b[field][name].double() for b in before) / old
                assert mean.abs().max() > 0
                torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)


def _hooked(rank, size, options):
    net = cases.model()
    ddp = nn.parallel.DistributedDataParallel(net)
    state, hook = tw.ddp_hook("dgc", **options)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(8):
        net.zero_grad()
        cases.loss_of(ddp, rank, step).backward()
        optimizer.step()
    saved = state.state_dict()
    state.load_state_dict(saved)
    again = state.state_dict()
    state.close()
    return cases.weights(net), all(torch.equal(v, again[k]) for k, v in saved.items() if isinstance(v, torch.Tensor))


def test_a_ddp_hook_does_the_same():
    wanted = run(_as_sgd, 2)[0][1]
    for weights, kept in run(_hooked, 2, OPTIONS):
        assert kept
        for a, b in zip(weights, wanted):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def _decided(rank, size):
    net = cases.model(width=64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    slow = Costs.of_link(1e6, 1e-6, size)
    sync = tw.attach(
        net, optimizer, "topk", density=0.1, exchange="auto", fusion="optimal", detect_desync=True, costs=slow
    )
    first = [b.exchange for b in sync.plan.phases[0]]
    for step in range(14):
        net.zero_grad()
        cases.loss_of(net, rank, step, width=64).backward()
        optimizer.step()
    sync.close()
    return first, [b.exchange for b in sync.plan.phases[0] if not b.dense], sync.plan.hash, cases.weights(net)


def test_auto_is_decided_from_measured_times_and_the_same_on_all_ranks():
    results = run(_decided, 4, seconds=250)
    for first, decided, plan, weights in results:
        assert not any(first)
        assert set(decided) == {"gtopk"}  # half the start-ups and two thirds of the bytes of the all-gather
        assert plan == results[0][2]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][3]))


def test_one_rank_is_told_what_it_lacks(caplog):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with tw.attach(net, optimizer, "dgc") as sync:
        assert "without its momentum" in sync.stats().note
    assert "without its momentum" in caplog.text
