"""Prices of two levels: NODE by the inner link, CROSS by the card that a node's ranks share; the table of choices."""

import pytest

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.hitopk import HiTopK
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs, Linear, assumed_compute
from thinwire.core.pricing.hierarchy import CollectiveTable, way_seconds, ways
from thinwire.core.pricing.plans import Measured, PlanTensor, make_plan, needs_measurement
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Plan, PlanBucket, Topology
from thinwire.core.program.trace import steady_step, trace
from thinwire.predict.timeline import simulate

FREE = dict.fromkeys(("memory", "select", "multiply", "orthogonalise"), Linear(0, 0))
P, N, D = 8, 2, 1 << 20
LINK = Costs.of_link(
    1e9, 50e-6, P, N, efficiency=1.0, node_bits_per_second=10e9, node_latency_seconds=5e-6, compute=FREE
)
A_E, B_E, A_I, B_I = 50e-6, 8 / 1e9, 5e-6, 8 / 10e9


def slow_halves():
    """16 ranks on 4 nodes, where reduce-scatter and all-gather start slowly in a node: small messages go by leaders."""
    costs = Costs.of_link(1e9, 1e-3, 16, 4, node_latency_seconds=1e-5, node_bits_per_second=4e9, compute=FREE)
    slow = {("ReduceScatter", "node", 4): Linear(5e-4, 1e-9), ("AllGather", "node", 4): Linear(5e-4, 3e-9)}
    return Costs({**costs.exchanges, **slow}, FREE)


def exchange_seconds(method, costs=LINK, topology=None, d=D, plan=None):
    profile = profile_of((d,))
    return simulate(method, profile, topology or Topology(P, N), costs, plan=plan).step_seconds


def profile_of(sizes):
    return ModelProfile("free", tuple(TensorTime(f"t{i}", (size,), 0.0) for i, size in enumerate(sizes)), 0.0)


def test_each_scope_has_its_own_price():
    m, size = P // N, 4 * D
    torus = 2 * (N - 1) * A_I + 2 * (N - 1) / N * size * B_I + 2 * (m - 1) * A_E + 2 * (m - 1) / m * size * B_E
    assert exchange_seconds(SSGD(collective="torus")) == pytest.approx(torus)
    flat = 2 * (P - 1) * A_E + 2 * (P - 1) / P * size * B_E
    assert exchange_seconds(SSGD()) == pytest.approx(flat)
    # One rank of the node crosses alone and has the card for itself; the broadcast in the node is one message.
    three = 2 * (N - 1) * A_I + 2 * (N - 1) / N * size * B_I + 2 * (m - 1) * A_E + 2 * (m - 1) / m * size * B_E
    three += A_I + size * B_I
    assert exchange_seconds(SSGD(collective="three_phase")) == pytest.approx(three)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_hitopk_costs_what_the_formula_says(density):
    m, shard = P // N, D // N
    kept = int(density * shard + 1e-6)
    inside = 2 * (N - 1) * A_I + 2 * (N - 1) / N * 4 * D * B_I
    across = (m - 1) * A_E + (m - 1) * 8 * kept * N * B_E
    assert exchange_seconds(HiTopK(density), plan=Plan.of([["t0"]])) == pytest.approx(inside + across)


@pytest.mark.parametrize("way", ["flat", "three_phase", "torus"])
@pytest.mark.parametrize("nodes,ranks", [(2, 2), (4, 2), (2, 8)])
def test_the_table_prices_what_the_programs_issue(way, nodes, ranks):
    topology = Topology(nodes * ranks, ranks)
    costs = Costs.of_link(1e9, 1e-4, nodes * ranks, ranks, compute=FREE)
    d = 8 * 1024
    assert way_seconds(way, 4 * d, costs, topology) == pytest.approx(
        exchange_seconds(SSGD(collective=way), costs, topology, d)
    )


def test_the_table_takes_the_cheapest():
    slow_start = slow_halves()
    for costs in (LINK, slow_start):
        topology = Topology(P, N) if costs is LINK else Topology(16, 4)
        table = CollectiveTable(costs, topology)
        for power in range(10, 29):
            price = {way: way_seconds(way, 1 << power, costs, topology) for way in ways(topology)}
            assert price[table.choice(1 << power)] == min(price.values())
    assert table.entries[0][1] == "three_phase"
    assert table.entries[-1][1] == "torus"
    _, (at, _) = table.entries
    few, many = (way_seconds("three_phase", x, slow_start, topology) for x in (at - 1, at))
    assert few <= way_seconds("torus", at - 1, slow_start, topology)
    assert many > way_seconds("torus", at, slow_start, topology)


def test_ways_of_a_layout():
    assert ways(Topology(4)) == ways(Topology(4, 4)) == ("flat",)
    assert ways(Topology(5, [3, 2])) == ("flat", "three_phase")


def test_auto_is_written_into_the_plan():
    costs = slow_halves()
    topology, sizes = Topology(16, 4), [100, 5_000_000]
    profile = profile_of(sizes)
    tensors = [PlanTensor(t.name, t.shape) for t in profile.tensors]
    method = SSGD(collective="auto", fusion="none")
    assert needs_measurement(method)
    assert not needs_measurement(SSGD(collective="torus"))
    before = make_plan(method, tensors, [0, 1], (), "gloo")
    assert [b.collective for b in before.phases[0]] == ["", ""]
    plan = make_plan(method, tensors, [0, 1], (), "gloo", Measured(profile, costs, topology))
    assert [b.collective for b in plan.phases[0]] == ["three_phase", "torus"]
    auto = simulate(method, profile, topology, costs, plan=plan).step_seconds
    for way in ways(topology):
        fixed = Plan((tuple(PlanBucket(b.names, collective=way) for b in plan.phases[0]),))
        assert auto <= simulate(method, profile, topology, costs, plan=fixed).step_seconds + 1e-12
    merged = make_plan(
        SSGD(collective="auto", fusion="optimal"), tensors, [0, 1], (), "gloo", Measured(profile, costs, topology)
    )
    assert all(b.collective for b in merged.phases[0])
    half = make_plan(
        Cast(collective="auto", fusion="none"), tensors, [0, 1], (), "gloo", Measured(profile, costs, topology)
    )
    assert half.phases[0][1].collective == "torus"


WAYS = ("three_phase", "torus", "auto", "threshold:0.01")


@pytest.mark.parametrize(
    "method", [HiTopK(0.1), *(make(collective=way) for make in (SSGD, Cast, ACP) for way in WAYS)], ids=str
)
def test_one_number_per_segment(method):
    costs = Costs({}, assumed_compute())
    for topology in (Topology(8, 2), Topology(6, 3), Topology(4, 4), Topology(3)):
        for shapes in ([(64, 48)], [(33, 5), (129,)], [(1,)]):
            named = [(str(i), shape) for i, shape in enumerate(shapes)]
            for phase in range(method.phases):
                steps = trace(method, named, topology, step=steady_step(method, phase))
                assert len(method.compute_seconds(shapes, phase, topology, costs)) == len(steps) + 1
