import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.pricing.costs import KINDS, Costs, Linear, Table
from thinwire.core.pricing.wire_model import carried
from thinwire.core.program import CROSS, NODE, WORLD, Topology
from thinwire.core.program.trace import trace

MEASURED = Linear(1e-3, 1e-9, "measured here", "probe")


def test_a_table_is_flat_then_straight_then_goes_on():
    table = Table(((100, 1.0), (200, 2.0), (400, 3.0)))
    assert [table(x) for x in (0, 100, 150, 200, 300, 400, 600)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert Table(((100, 1.0),))(1e9) == 1.0
    assert Table(((100, 2.0), (200, 1.0)))(1e9) == 1.0  # a falling last piece is not extrapolated


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]))
def test_a_table_passes_through_its_points(points):
    table = Table(tuple(sorted(points)))
    assert all(table(x) == pytest.approx(y, rel=1e-12, abs=1e-12) for x, y in points)
    assert table(2e9) >= 0


def test_ring_formulas():
    workers, d, a, b = 8, 1_000_000, 1e-4, 8 / 1e9
    costs = Costs.of_link(1e9, a, workers, efficiency=1.0)
    want = {
        "AllReduce": 2 * 7 * a + 2 * 7 / 8 * d * b,
        "ReduceScatter": 7 * a + 7 / 8 * d * b,
        "AllGather": 7 * a + 7 * d * b,
        "AllToAll": 7 * a + 7 / 8 * d * b,
        "Broadcast": 3 * (a + d * b),
        "Exchange": a + d * b,
    }
    assert set(want) == set(KINDS)
    for kind, seconds in want.items():
        assert costs.seconds(kind, WORLD, workers, d) == pytest.approx(seconds, rel=1e-12)
        assert costs.lookup(kind, "world", workers).provenance == "assumed"
        assert costs.seconds(kind, "node", 1, d) == 0.0


@pytest.mark.parametrize(
    "workers, turns", [(2, (1, 1, 1, 1)), (3, (2, 1, 1, 1)), (16, (2, 1, 1, 1)), (17, (32, 16, 16, 1))]
)
def test_a_delay_counts_once_for_each_turn(workers, turns):
    """Up to 16 ranks on Gloo send to all others at once."""
    near, far = (Costs.of_link(1e9, 1e-4, workers, delay_seconds=delay) for delay in (0.0, 0.025))
    for kind, count in zip(("AllReduce", "ReduceScatter", "AllGather", "Exchange"), turns):
        more = far.seconds(kind, WORLD, workers, 10**6) - near.seconds(kind, WORLD, workers, 10**6)
        assert more == pytest.approx(0.025 * count)
        assert far.travel_seconds(kind, WORLD, workers) == pytest.approx(0.025 * count)
        assert near.travel_seconds(kind, WORLD, workers) == 0
    inside = Costs.of_link(1e9, 1e-4, 8, 4, delay_seconds=0.025)
    assert inside.seconds("AllReduce", "node", 4, 10**6) < 0.025 < inside.seconds("AllReduce", "cross", 2, 10**6)
    assert Costs.of_link(1e9, 1e-4, 4, trees=True, delay_seconds=0.025).travel_seconds("AllGather", WORLD, 4) == 0
    assert Table(((4096, 0.026), (1 << 20, 0.1))).travel_seconds == 0.026
    assert Table(((4096, 0.002), (1 << 20, 0.1))).travel_seconds == 0


def test_what_tcp_carries_over_a_wire_that_loses_packets():
    """The formulas of RFC 9438; in the lab one connection of CUBIC carried 6.6 to 9.4 of 100 Mbit/s."""
    one = carried(100e6, 0.05, 0.001, sockets=1)
    assert one == pytest.approx(1.224745 * 0.001**-0.5 * 1448 * 8 / 0.05, rel=0.01)
    assert carried(1e9, 0.05, 1e-6, sockets=1) == pytest.approx(1.054 * (0.05 / 1e-6) ** 0.75 * 11584 / 0.05, rel=0.3)
    assert one < carried(100e6, 0.05, 0.001) < 16 * one
    assert carried(100e6, 0.05, 0.0) == carried(100e6, 0.0, 0.01) == 100e6
    assert carried(100e6, 0.05, 0.01, bbr=True) == pytest.approx(0.95 * 0.99 * 100e6)
    for rates in zip(*[[carried(100e6, trip, loss) for loss in (0.0, 1e-4, 1e-3, 1e-2)] for trip in (0.01, 0.1)]):
        assert rates[0] >= rates[1]
    with pytest.raises(ValueError, match="loss of 100"):
        carried(1e8, 0.05, 1.0)


def test_small_sums_go_along_trees_where_there_are_trees():
    a, b = 1e-4, 8 / 1e9
    ring = Costs.of_link(1e9, a, 1024, efficiency=1.0)
    both = Costs.of_link(1e9, a, 1024, efficiency=1.0, trees=True)
    for kind in KINDS:
        for size in (4, 10**5, 10**12):
            assert both.seconds(kind, WORLD, 1024, size) <= ring.seconds(kind, WORLD, 1024, size)
            if kind != "AllReduce":
                assert both.seconds(kind, WORLD, 1024, size) == ring.seconds(kind, WORLD, 1024, size)
    assert both.seconds("AllReduce", WORLD, 1024, 0) == pytest.approx(20 * a)
    assert both.seconds("AllReduce", WORLD, 1024, 10**12) == ring.seconds("AllReduce", WORLD, 1024, 10**12)
    # A tree of depth 20 with pieces of n bytes, the best of many n; the formula takes n for a real number.
    size = 10**6
    pieced = min((20 + 2 * size / n) * (a + n * b) for n in range(1000, 200_000, 10))
    assert both.seconds("AllReduce", WORLD, 1024, size) == pytest.approx(pieced, rel=1e-6)
    # Two ranks have nothing to gain, and sizes that were not priced follow the formulas.
    assert Costs.of_link(1e9, a, 2, trees=True).seconds("AllReduce", WORLD, 2, 4) == pytest.approx(2 * a, rel=1e-3)
    small = Costs.of_link(1e9, a, 4, efficiency=1.0, trees=True)
    for kind in KINDS:
        assert small.seconds(kind, WORLD, 1024, size) == pytest.approx(both.seconds(kind, WORLD, 1024, size), rel=1e-9)
    assert Costs.from_json(both.to_json()) == both
    with pytest.raises(ValueError, match="not a file of thinwire costs"):
        Costs.from_json(
            both.to_json().replace(
                '"tree": {"startup_seconds": 0.002, "seconds_per_byte": 1.6e-08', '"tree": {"points": [[1, 1]]'
            )
        )


def test_what_was_measured_rules_over_trees():
    measured = Linear(1.0, 1e-9, "measured here")
    costs = Costs({("AllReduce", "world", 1024): measured})
    assert costs.seconds("AllReduce", WORLD, 1024, 4) == measured(4)
    assert costs.lookup("AllReduce", WORLD, 2048)(0) == pytest.approx(2047 / 1023)


def test_two_levels_share_the_card_of_a_machine():
    a, b = 1e-4, 8 / (1e9 * 0.94)
    costs = Costs.of_link(1e9, a, 16, 4, node_bits_per_second=8e9, node_latency_seconds=1e-5)
    assert costs.seconds("AllGather", CROSS, 4, 1000) == pytest.approx(3 * (a + 4 * 1000 * b))
    assert costs.seconds("AllGather", NODE, 4, 1000) == pytest.approx(3 * (1e-5 + 1000 / 1e9))
    assert costs.seconds("AllGather", WORLD, 16, 1000) == pytest.approx(15 * (a + 1000 * b))
    assert costs.seconds("AllToAll", WORLD, 16, 1000) == pytest.approx(15 * a + 4 * 12 / 16 * 1000 * b)
    inside = Costs.of_link(1e9, a, 4, 4, node_bits_per_second=8e9, node_latency_seconds=1e-5)
    assert inside.seconds("AllReduce", WORLD, 4, 1000) == pytest.approx(6 * 1e-5 + 1.5 * 1000 / 1e9)


@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_of_workers_follow_the_formula(kind):
    small, large = Costs.of_link(1e9, 1e-4, 4), Costs.of_link(1e9, 1e-4, 64)
    assert small.seconds(kind, WORLD, 64, 12345) == pytest.approx(large.seconds(kind, WORLD, 64, 12345), rel=1e-12)
    assert small.seconds(kind, NODE, 64, 12345) == pytest.approx(large.seconds(kind, WORLD, 64, 12345), rel=1e-12)
    only = Costs({("AllReduce", "world", 4): small.lookup("AllReduce", "world", 4)})
    assert only.seconds(kind, WORLD, 64, 12345) == pytest.approx(large.seconds(kind, WORLD, 64, 12345), rel=1e-12)


def test_what_was_measured_says_so_and_the_rest_is_assumed():
    table = Table(((1000, 1e-3), (10**6, 5e-3)), "measured here", "probe")
    costs = Costs({("AllReduce", "world", 4): MEASURED, ("AllReduce", "world", 8): table})
    assert costs.lookup("AllReduce", WORLD, 4) == MEASURED
    assert costs.lookup("AllReduce", WORLD, 8).provenance == "measured here"
    scaled = costs.lookup("AllReduce", WORLD, 16)
    assert scaled.provenance == "assumed"
    assert "of 8" in scaled.source
    assert scaled(1000) == pytest.approx(1e-3 * 15 / 7)
    assert scaled(10**6) == pytest.approx(1e-3 * 15 / 7 + 4e-3 * (15 / 16) / (7 / 8))
    with pytest.raises(LookupError, match="hold no exchange"):
        Costs({}).lookup("AllReduce", WORLD, 4)
    with pytest.raises(ValueError, match="Gossip"):
        costs.lookup("Gossip", WORLD, 4)


def test_messages_are_priced_as_programs_issue_them():
    """Bytes of a traced step go in as they are: sent bytes over the rate, on a link without latency."""
    from thinwire.core.methods.registry import method

    rate, topology = 1e9, Topology(5)
    costs = Costs.of_link(rate, 0.0, 5, efficiency=1.0)
    steps = [
        step
        for name, options in (("ssgd", {"deterministic": True}), ("ssgd", {}), ("topk", {"density": 0.1}))
        for step in trace(method(name, **options), [("w", (100, 50))], topology)
    ]
    assert {step.kind for step in steps} == {"AllReduce", "ReduceScatter", "AllGather"}
    for step in steps:
        seconds = costs.seconds(step.kind, step.scope, 5, step.message_bytes)
        assert seconds == pytest.approx(step.sent_bytes * 8 / rate, rel=1e-3)
