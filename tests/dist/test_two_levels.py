"""Two nodes of two ranks on real Gloo: bit for bit LocalWorld; mixed plans; checkpoints of shards."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.hierarchy import CollectiveTable
from thinwire.core.program import LocalWorld, Plan, PlanBucket, Topology

pytestmark = pytest.mark.dist

NAMES = [name for name, _ in cases.model().named_parameters()]
TWO = [NAMES[4:][::-1], NAMES[:4][::-1]]
MIXED = Plan(
    (tuple(PlanBucket((n,), collective=("torus", "flat", "three_phase")[i % 3]) for i, n in enumerate(NAMES)),)
)
CASES = [
    ("ssgd", {"collective": "torus"}, Plan.of(*[TWO])),
    ("ssgd", {"collective": "three_phase"}, Plan.of(*[TWO])),
    ("cast", {"dtype": "fp16", "collective": "torus"}, Plan.of(*[TWO])),
    ("acp", {"rank": 2, "min_rate": 1.0, "collective": "torus"}, Plan.of(TWO, TWO)),
    ("hitopk", {"density": 0.1}, Plan.of(*[TWO])),
    ("hitopk", {"density": 0.1, "value_dtype": "fp16"}, Plan.of(*[[[n] for n in NAMES]])),
]
STEPS = 3


def _gradients(net, rank, step):
    net.zero_grad()
    cases.loss_of(net, rank, step).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters()}


def _engine(rank, size):
    found = []
    for name, options, plan in CASES:
        net = cases.model()
        sync = tw.attach(
            net, None, name, plan=plan, topology=Topology(4, 2), keep_dense="none", detect_desync=True,
            start_compression_step=0, **options,
        )  # fmt: skip
        results = [_gradients(net, rank, step) for step in range(STEPS)]
        residuals = {
            n: sync.services.state.extended(n, dict(net.named_parameters())[n].shape)
            for n in sync.services.state.residuals
        }
        sent = sync.stats().bytes_sent
        sync.close()
        found.append((results, residuals, sent))
    return found


def test_gloo_equals_local_world():
    results = run(_engine, 4, seconds=250)
    for index, (name, options, plan) in enumerate(CASES):
        world, net = LocalWorld(4, 2, plan=plan), cases.model()
        method = tw.method(name, **options)
        for step in range(STEPS):
            wanted = world.step(method, [_gradients(net, rank, step) for rank in range(4)])
            for rank in range(4):
                got = results[rank][index][0][step]
                assert all(torch.equal(got[n], wanted[rank][n]) for n in NAMES), (name, rank, step)
        owed = world.residuals()
        for rank in range(4):
            mine = results[rank][index][1]
            assert mine.keys() == owed[rank].keys()
            assert all(torch.equal(mine[n], owed[rank][n]) for n in mine), (name, rank)
            assert results[rank][index][2] == world.bytes_sent()[rank], (name, rank)


def _mixed(rank, size, steps):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = tw.attach(net, optimizer, "ssgd", plan=MIXED, topology=Topology(4, 2), detect_desync=True)
    cases.walk(net, optimizer, rank, 0, steps)
    sync.close()
    return cases.weights(net)


def test_buckets_that_go_different_ways_do_not_hang():
    results = run(_mixed, 4, 50, seconds=250)
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other))


def _train(rank, size, folder, layout, first, last, fusion):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sync = tw.attach(
        net, optimizer, "hitopk", density=0.1, start_compression_step=0, fusion=fusion, topology=Topology(size, layout)
    )
    if first:
        assert tw.checkpoint.load(folder, net, optimizer, sync) == first
    loaded = {
        n: sync.services.state.extended(n, p.shape).clone()
        for n, p in net.named_parameters()
        if n in sync.services.state.residuals
    }
    for step in range(first, last):
        if step == 5 and not first:
            tw.checkpoint.save(folder, net, optimizer, sync, 5)
        cases.down(cases.loss_of(net, rank, step), optimizer)
    owed = {
        n: sync.services.state.extended(n, p.shape)
        for n, p in net.named_parameters()
        if n in sync.services.state.residuals
    }
    sync.close()
    return loaded, owed, cases.weights(net)


def _total(results, place):
    """What all ranks owe together, by name."""
    names = {n for result in results for n in result[place]}
    return {n: sum(result[place][n].double() for result in results if n in result[place]) for n in names}


def test_checkpoints_of_shards(tmp_path):
    folder = str(tmp_path)
    through = run(_train, 4, folder, 2, 0, 9, "auto", seconds=250)
    again = run(_train, 4, folder, 2, 5, 9, "auto", seconds=250)
    for a, b in zip(through, again):
        assert a[1].keys() == b[1].keys()
        assert all(torch.equal(a[1][n], b[1][n]) for n in a[1])
        assert all(torch.equal(x, y) for x, y in zip(a[2], b[2]))
    saved = _total(again, 0)
    assert any(x.abs().max() > 0 for x in saved.values())
    other_plan = run(_train, 4, folder, 2, 5, 8, "none", seconds=250)  # the same slices, cut anew at its first step
    assert all(torch.equal(a[0][n], b[0][n]) for a, b in zip(again, other_plan) for n in a[0])
    fewer = run(_train, 2, folder, 1, 5, 8, "auto", seconds=250)
    for name, x in _total(fewer, 0).items():  # the sum over ranks, over the number of ranks, is what the model is owed
        torch.testing.assert_close(x / 2, saved[name] / 4, rtol=1e-6, atol=1e-8)


def _refused(rank, size):
    net = cases.model()
    with pytest.raises(ValueError, match="use TopK, which works with any layout"):
        tw.attach(net, torch.optim.SGD(net.parameters()), "hitopk", density=0.1, topology=Topology(3, [2, 1]))
    with pytest.raises(ValueError, match="three_phase"):
        tw.attach(net, torch.optim.SGD(net.parameters()), "ssgd", collective="torus", topology=Topology(3, [2, 1]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, "ssgd", collective="three_phase", topology=Topology(3, [2, 1]))
    cases.loss_of(net, rank, 0).backward()
    sync.close()
    return [p.grad.clone() for p in net.parameters()]


def test_uneven_nodes():
    results = run(_refused, 3)
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other))


def _auto(rank, size, costs):
    net = cases.model(width=64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = tw.attach(
        net, optimizer, "ssgd", collective="auto", fusion="none", topology=Topology(4, 2), costs=Costs.from_json(costs)
    )
    before = [b.collective for b in sync.plan.phases[0]]
    for step in range(14):
        cases.down(cases.loss_of(net, rank, step, width=64), optimizer)
    sync.close()
    return before, sync.stats().settled, sync.plan.to_json(), cases.weights(net)


def test_auto_takes_over_what_rank_0_measured():
    costs = Costs.of_link(1e9, 1e-3, 4, 2, node_latency_seconds=1e-5)
    slow = {("ReduceScatter", "node", 2): Linear(5e-5, 0), ("AllGather", "node", 2): Linear(5e-5, 0)}
    costs = Costs({**costs.exchanges, **slow}, costs.compute)
    table = CollectiveTable(costs, Topology(4, 2))
    results = run(_auto, 4, costs.to_json(), seconds=250)
    sizes = {n: 4 * p.numel() for n, p in cases.model(width=64).named_parameters()}
    for before, settled, plan, weights in results:
        assert set(before) == {""}
        assert settled
        assert plan == results[0][2]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][3]))
    chosen = {b.names[0]: b.collective for b in Plan.from_json(results[0][2]).phases[0]}
    assert chosen == {name: table.choice(size) for name, size in sizes.items()}
