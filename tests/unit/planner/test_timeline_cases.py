"""Single properties of a simulated step, each by hand; bottlenecks; traces; refusals."""

import json
from dataclasses import dataclass

import pytest
from timelines import FREE, DeAR, Selecting, busy, costs_of, lane, profile_of

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.profiles import ModelProfile, ModuleTime, TensorTime, builtin
from thinwire.core.program import AllReduce, Method, NextForward, Plan, Topology
from thinwire.predict.timeline import LANES, Event, bound_by, simulate, write_trace
from thinwire.predict.timeline.result import exposed_seconds, to_chrome_trace

TWO = Topology(2)


def selecting(**options):
    """Two tensors, backward 1 s each, forward 1 s, selection 0.5 s, exchange 2 s."""
    costs = costs_of(Linear(2.0, 0), 2, compute={"select": Linear(0.5, 0)})
    return simulate(Selecting(), profile_of([8, 8], [1.0, 1.0], forward=1.0), TWO, costs, **options)


def spans(timeline, *lanes):
    return [(e.name, e.start_seconds, e.end_seconds) for e in lane(timeline, *lanes)]


@dataclass(frozen=True)
class Evenly(Selecting):
    """Half a second before the exchange and after it."""

    def compute_seconds(self, shapes, phase, topology, costs):
        return [0.5, 0.5]


def test_a_segment_stops_a_gradient_in_the_middle():
    """The work after an exchange falls into the next gradient, which goes on afterwards."""
    profile = profile_of([8, 8], [1.0, 2.0], forward=0.0)
    timeline = simulate(Evenly(), profile, TWO, costs_of(Linear(0.25, 0), 2))
    pieces = spans(timeline, "compute")
    assert pieces == [("backward m0.w", 0, 1), ("backward m1.w", 1.5, 1.75), ("backward m1.w", 2.25, 4.0)]
    assert spans(timeline, "method")[:2] == [("segment", 1.0, 1.5), ("segment", 1.75, 2.25)]


def test_exchanges_take_cpu():
    profile = profile_of([8, 8], [1.0, 1.0], forward=0.0)
    costs = costs_of(Linear(0.5, 0), 2, cpu_share={"AllReduce": Linear(0.3, 0)})
    shared = simulate(SSGD(fusion="none"), profile, TWO, costs)
    assert [e.start_seconds for e in lane(shared, "method")] == pytest.approx([1.0, 2.3])
    assert {(e.name, e.duration_seconds) for e in lane(shared, "method")} == {("exchange on the CPU", 0.3)}
    assert shared.step_seconds == pytest.approx(2.8)
    assert shared.exposed_seconds == pytest.approx(0.3 + 0.5)  # while it is worked at, an exchange is not hidden
    alone = simulate(SSGD(fusion="none"), profile, TWO, costs, shared_compute=False)
    assert alone.step_seconds == pytest.approx(2.5)
    assert not lane(alone, "method")


def test_what_travels_leaves_the_link_to_others():
    """Two exchanges of half a second, of which the wire takes 0.4: the second follows 0.1 s after the first."""
    profile = profile_of([8, 8], [1.0, 0.0], forward=0.0)
    timeline = simulate(SSGD(fusion="none"), profile, TWO, costs_of(Linear(0.5, 0, travel_seconds=0.4), 2))
    assert timeline.step_seconds == pytest.approx(1.6)
    assert exposed_seconds(timeline.events) == pytest.approx(0.6)


def test_the_slowest_rank_counts():
    one = selecting(slowdown=3.0)
    assert selecting(slowdown=[1.0, 3.0]) == one
    assert busy(lane(one, "compute")) == pytest.approx(9.0)
    assert busy(lane(one, "method")) == pytest.approx(3.0)
    assert busy(lane(one, "link world")) == pytest.approx(4.0)


def test_a_deferred_update_comes_before_its_layer():
    costs = costs_of(Linear(0.0, 0), 2)
    profile = profile_of([6, 2], [0.0, 0.0], forward=2.0)
    timeline = simulate(DeAR(), profile, TWO, costs, optimizer_seconds=4.0)
    want = [("optimizer", 0, 1), ("forward m1", 1, 2), ("optimizer", 2, 5), ("forward m0", 5, 6)]
    assert spans(timeline, "compute") == want
    assert timeline.step_seconds == 6


def test_modules():
    """Owners by name, the nearest around them, or the first; their seconds make up the whole forward pass."""
    tensors = tuple(TensorTime(name, (4,), 0.0) for name in ("a.deep.w", "b.w", "loose"))
    profile = ModelProfile("m", tensors, 4.0, (ModuleTime("b", 1.0), ModuleTime("a", 1.0)))
    timeline = simulate(DeAR(), profile, TWO, costs_of(Linear(1.0, 0), 2, kind="AllGather"))
    gathers = [e.bucket for e in lane(timeline, "link world") if e.name == "AllGather"]
    assert gathers == [2, 1, 0]
    assert [e.duration_seconds for e in lane(timeline, "compute") if "forward" in e.name] == [2.0, 2.0]
    bare = ModelProfile("m", tensors, 3.0)
    names = [e.name for e in simulate(SSGD(), bare, TWO, costs_of(Linear(0, 0), 2)).events if "forward" in e.name]
    assert names == ["forward ", "forward b", "forward a.deep"]


def test_phases_are_averaged():
    tensors = (TensorTime("m.w", (100, 400), 0.1),)
    profile = ModelProfile("m", tensors, 0.1)
    timeline = simulate(ACP(rank=4), profile, TWO, costs_of(Linear(0, 1e-3), 2))
    assert timeline.step_seconds == pytest.approx(0.2 + 4e-3 * 4 * 250)
    assert timeline.bytes_sent == 4 * 4 * 250
    assert [e.bytes for e in lane(timeline, "link world")] == [1600, 6400]
    assert busy(lane(timeline, "compute")) == pytest.approx(0.4)


@dataclass(frozen=True)
class Mixed(Method):
    """Small buckets at once, large ones with a pause."""

    def reduce(self, bucket, state):
        yield AllReduce(bucket.flat)
        if bucket.numel > 10:
            yield NextForward()
            yield AllReduce(bucket.flat)
            yield NextForward()
            yield AllReduce(bucket.flat)


def test_coupled_buckets_beside_deferred_ones():
    profile = profile_of([20, 4], [1.0, 1.0], forward=1.0)
    plan = Plan.of([["m0.w"], ["m1.w"]])
    timeline = simulate(Mixed(), profile, TWO, costs_of(Linear(0.25, 0), 2), plan=plan, optimizer_seconds=2.4)
    assert [(e.bucket, e.start_seconds) for e in lane(timeline, "link world")] == [(0, 0), (0, 0.25), (0, 4), (1, 5)]
    assert [e.duration_seconds for e in lane(timeline, "compute") if e.name == "optimizer"] == pytest.approx([2, 0.4])


def test_dense_buckets():
    profile = ModelProfile("m", (TensorTime("a.w", (40, 40), 0.1), TensorTime("a.b", (40,), 0.1)), 0.1)
    timeline = simulate(TopK(0.1), profile, TWO, Costs.of_link(1e9, 1e-4, 2))
    assert [b.dense for b in timeline.plan.phases[0]] == [False, True]
    assert [e.name for e in lane(timeline, "link world")] == ["AllGather", "AllReduce"]
    same = simulate(TopK(0.1), profile, TWO, Costs.of_link(1e9, 1e-4, 2), dense=SSGD())
    assert same == timeline
    ordered = simulate(TopK(0.1), profile, TWO, Costs.of_link(1e9, 1e-4, 2), dense=SSGD(deterministic=True))
    assert [e.name for e in lane(ordered, "link world")] == ["AllGather", "ReduceScatter", "AllGather"]


def test_exposed():
    events = [
        Event("f", "compute", 0, 2),
        Event("s", "method", 3, 1),
        Event("x", "link world", 1, 4),  # open in [2, 3] and [4, 5]
        Event("y", "link node", 4.5, 1),  # open in [5, 5.5] beside it
        Event("exchange on the CPU", "method", 2, 3),
    ]
    assert exposed_seconds(events) == pytest.approx(2.5)
    assert exposed_seconds([]) == 0


@pytest.mark.parametrize(
    "want, link, flops, method",
    [
        ("compute", (1e10, 1e-5), 1e11, SSGD()),
        ("network bandwidth", (1e8, 1e-5), 1e13, SSGD()),
        ("network latency", (1e11, 1e-2), 1e14, SSGD(fusion="none")),
        ("method compute", (1e11, 1e-6), 1e15, TopK(0.001)),
    ],
)
def test_bound_by(want, link, flops, method):
    profile = builtin("resnet50", batch_size=8, device_flops=flops)
    assert bound_by(method, profile, Topology(8), Costs.of_link(*link, 8)) == want


def test_a_trace_loads_and_has_the_lanes(tmp_path):
    costs = Costs.of_link(1e9, 1e-4, 8)
    timeline = simulate(TopK(0.01), builtin("resnet50"), Topology(8), costs, shared_compute=False)
    write_trace(tmp_path / "trace.json", timeline.events, rank=3, label="topk")
    trace = json.loads((tmp_path / "trace.json").read_text())
    meta = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    lanes = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    assert tuple(lanes.values()) == LANES
    assert meta[0]["args"] == {"name": "topk, rank 3"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    assert {e["pid"] for e in trace["traceEvents"]} == {3}
    for event, drawn in zip(timeline.events, complete):
        assert lanes[drawn["tid"]] == event.lane
        assert drawn["ts"] == pytest.approx(event.start_seconds * 1e6)
        assert drawn["dur"] == pytest.approx(event.duration_seconds * 1e6)
        assert drawn["args"].get("bytes", 0) == event.bytes
    with_more = to_chrome_trace([Event("g", "guard", 0, 1)])
    assert [e["args"]["name"] for e in with_more["traceEvents"] if e["name"] == "thread_name"] == [*LANES, "guard"]


@dataclass(frozen=True)
class Overpriced(Method):
    def compute_seconds(self, shapes, phase, topology, costs):
        return [0.0] * 3

    def reduce(self, bucket, state):
        yield AllReduce(bucket.flat)


@dataclass(frozen=True)
class Wrong(Overpriced):
    def compute_seconds(self, shapes, phase, topology, costs):
        return [0.0, float("nan")]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"backend": "mpi"}, "'mpi' is unknown"),
        ({"slowdown": [1.0]}, "1 entries for 2 ranks"),
        ({"slowdown": -1.0}, "slowdown"),
        ({"optimizer_seconds": -1.0}, "optimizer_seconds"),
        ({"plan": Plan.of([["m0.w"]])}, "missing"),
        ({"method": Overpriced()}, "prices 3 segments but has 2"),
        ({"method": Wrong()}, r"compute_seconds\[1\]"),
    ],
)
def test_refusals(options, message):
    arguments = {"method": SSGD(), "model_profile": profile_of([8, 8], [1.0, 1.0]), **options}
    with pytest.raises(ValueError, match=message):
        simulate(topology=TWO, costs=costs_of(Linear(1.0, 0), 2), **arguments)


def test_strange_gradients_are_refused():
    profile = ModelProfile("m", (TensorTime("a", (4,), 0.1),), 0.1, dtype_bytes=3)
    with pytest.raises(ValueError, match="3 bytes"):
        simulate(SSGD(), profile, TWO, costs_of(Linear(1.0, 0), 2))
    half = ModelProfile("m", (TensorTime("a", (4,), 0.1),), 0.1, dtype_bytes=2)
    assert simulate(SSGD(), half, TWO, costs_of(Linear(1.0, 0), 2)).bytes_sent == 8


def test_missing_curves_are_named():
    with pytest.raises(LookupError, match="AllReduce"):
        simulate(SSGD(), profile_of([8], [1.0]), TWO, Costs({}, FREE))
    with pytest.raises(LookupError, match="'memory'"):
        simulate(SSGD(), profile_of([8], [1.0]), TWO, costs_of(Linear(1.0, 0), 2, compute={}))


def test_options_that_cannot_be_hashed():
    @dataclass(frozen=True)
    class Listed(Selecting):
        layers: object = None

    costs = costs_of(Linear(2.0, 0), 2, compute={"select": Linear(0.5, 0)})
    got = simulate(Listed(layers=[1]), profile_of([8, 8], [1.0, 1.0], forward=1.0), TWO, costs)
    assert got == selecting()
