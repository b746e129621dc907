"""The simulator against the clock, against DeAR's table, and against the laws that every timeline obeys."""

import math
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_nets import net, sort_seconds
from test_clock import some_groups
from timelines import FREE, DeAR, Hierarchical, Selecting, busy, costs_of, lane, overlap, profile_of

import thinwire as tw
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, Linear, Table
from thinwire.core.pricing.merge import finish
from thinwire.core.pricing.profiles import ModelProfile, TensorTime, builtin
from thinwire.core.program import Plan, Topology
from thinwire.core.program.trace import trace
from thinwire.predict.timeline import LANES, simulate

METHODS = [SSGD(), SSGD(deterministic=True), Cast(), SignSGD(), TopK(0.1), PowerSGD(rank=2), ACP(rank=2), DeAR()]


def random_case(draw):
    n = net(draw, 1, 30)
    n.sizes = [max(1, size) for size in n.sizes]
    groups = some_groups(draw, len(n.sizes))
    plan = Plan.of([[f"m{i}.w" for i in group] for group in groups])
    return n, groups, plan


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ssgd_is_the_clock(shared, backend):
    draw = random.Random(f"{shared} {backend}")
    for case in range(75):
        n, groups, plan = random_case(draw)
        curve = Linear(draw.uniform(0, 5e-3), 1e-9) if case % 2 else Table(((1e4, 1e-3), (1e6, 2e-3), (1e7, 0.1)))
        want = finish(groups, n.sizes, n.seconds, lambda d, curve=curve: curve(4 * d))
        got = simulate(
            SSGD(),
            profile_of(n.sizes, n.seconds),
            Topology(4),
            costs_of(curve, 4),
            plan=plan,
            shared_compute=shared,
            backend=backend,
        )
        assert got.step_seconds - 0.5 == pytest.approx(want, rel=1e-9)
        assert got.exposed_seconds == pytest.approx(want - sum(n.seconds), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("side_stream", [True, False])
def test_selection_is_the_clock(side_stream):
    draw = random.Random(side_stream)
    for case in range(100):
        n, groups, plan = random_case(draw)
        curve, select = Linear(draw.uniform(0, 5e-3), 1e-9), Linear(1e-5, draw.uniform(0, 5e-9))
        if case % 2:  # or any other curve
            select = Table(tuple((d, sort_seconds(d)) for d in sorted(set(n.sizes))))
        want = finish(groups, n.sizes, n.seconds, lambda d, c=curve: c(4 * d), select, side_stream=side_stream)
        costs = costs_of(curve, 2, compute={"select": select})
        profile = profile_of(n.sizes, n.seconds)
        got = simulate(Selecting(), profile, Topology(2), costs, plan=plan, shared_compute=not side_stream)
        assert got.step_seconds - 0.5 == pytest.approx(want, rel=1e-9)


DEAR = {  # seconds as published
    (1, 10): 3.1, (1, 50): 3.02, (1, 200): 3.005, (2, 10): 3.2, (2, 50): 3.04, (2, 200): 3.01,
    (3, 10): 3.75, (3, 50): 3.55, (3, 200): 3.513, (4, 10): 4.3, (4, 50): 4.06, (4, 200): 4.015,
    (6, 10): 6.3, (6, 50): 6.06, (6, 200): 6.015, (12, 10): 12.3, (12, 50): 12.06, (12, 200): 12.015,
}  # fmt: skip


@pytest.mark.parametrize(("c", "buckets"), [case for case in DEAR if case[1] < 200 or case[0] in (3, 12)])
def test_dear(c, buckets):
    """Forward 1, backward 2, communication c in equal halves. Of each pass, one bucket of the shorter sticks out."""
    size, workers = 8, 4
    profile = profile_of([size] * buckets, [2 / buckets] * buckets, forward=1.0)
    half = c / 2 / buckets
    costs = Costs(
        {
            ("ReduceScatter", "world", workers): Linear(0, half / (4 * size)),
            ("AllGather", "world", workers): Linear(0, half / (4 * size / workers)),
        },
        FREE,
    )
    exact = max(1, c / 2) + max(2, c / 2) + (min(1, c / 2) + min(2, c / 2)) / buckets
    for backend, method in product(("gloo", "nccl"), (DeAR(), tw.DeAR(fusion="none"), SSGD("none", decoupled=True))):
        got = simulate(method, profile, Topology(workers), costs, backend=backend)
        assert got.step_seconds == pytest.approx(DEAR[c, buckets], rel=0.005)
        assert got.step_seconds == pytest.approx(exact, rel=1e-9)


def test_the_first_step_of_dear_has_nothing_to_gather():
    profile = profile_of([8] * 10, [0.2] * 10, forward=1.0)
    costs = costs_of(Linear(0.01, 0), 4, kind="ReduceScatter")
    first, later = (simulate(DeAR(), profile, Topology(4), costs, steps=steps) for steps in (1, 2))
    assert {e.name for e in lane(first, "link world")} == {"ReduceScatter"}
    assert {e.name for e in lane(later, "link world")} == {"ReduceScatter", "AllGather"}
    assert simulate(DeAR(), profile, Topology(4), costs, steps=7) == later
    gathers = [e.bucket for e in lane(later, "link world") if e.name == "AllGather"]
    assert gathers == list(reversed(range(10)))  # as the forward needs them


@st.composite
def cases(draw):
    count = draw(st.integers(1, 12))
    shapes = [draw(st.sampled_from([(64, 40), (500,), (7, 9, 3), (), (0, 2), (300, 20)])) for _ in range(count)]
    seconds = [draw(st.floats(0, 0.01)) for _ in range(count)]
    tensors = tuple(TensorTime(f"m{i // 2}.{i}", s, t) for i, (s, t) in enumerate(zip(shapes, seconds)))
    return {
        "method": draw(st.sampled_from(METHODS)),
        "model_profile": ModelProfile("m", tensors, draw(st.floats(0, 0.05))),
        "plan": Plan.of([[t.name for t in tensors[i : i + 3]] for i in range(0, count, 3)]),
        "backend": draw(st.sampled_from(["gloo", "nccl"])),
        "shared_compute": draw(st.booleans()),
        "optimizer_seconds": draw(st.sampled_from([0.0, 0.003])),
    }


@settings(max_examples=150, deadline=None)
@given(case=cases(), workers=st.integers(2, 40), bits=st.sampled_from([1e7, 1e9, 1e11]))
def test_conservation(case, workers, bits):
    topology, costs = (
        Topology(workers),
        Costs.of_link(bits, 1e-4, workers, cpu_share={"AllReduce": Linear(1e-6, 1e-10)}),
    )
    profile, method = case["model_profile"], case["method"]
    plan = Plan(case["plan"].phases * method.phases)
    timeline = simulate(**{**case, "plan": plan}, topology=topology, costs=costs)
    shape_of = {t.name: t.shape for t in profile.tensors}
    priced = work = sent = 0.0
    for phase, buckets in enumerate(plan.phases):
        for bucket in buckets:
            shapes = [(name, shape_of[name]) for name in bucket.names]
            steps = trace(method, shapes, topology, step=(method.phases << 40) + phase)
            exchanges = [s for s in steps if s.scope]
            sent += sum(s.sent_bytes for s in exchanges)
            priced += sum(costs.seconds(s.kind, s.scope, workers, s.message_bytes) for s in exchanges)
            if any(math.prod(shape) for _, shape in shapes):
                work += sum(method.compute_seconds([s for _, s in shapes], phase, topology, costs) or [])
            if case["shared_compute"]:
                work += sum(costs.cpu_seconds(s.kind, s.message_bytes) for s in exchanges)
    compute = profile.forward_seconds + sum(profile.backward_seconds) + case["optimizer_seconds"]
    phases = method.phases
    assert busy(lane(timeline, "link world")) == pytest.approx(priced, rel=1e-9, abs=1e-12)
    assert busy(lane(timeline, "method")) == pytest.approx(work, rel=1e-9, abs=1e-12)
    assert busy(lane(timeline, "compute")) == pytest.approx(compute * phases, rel=1e-9, abs=1e-12)
    assert timeline.bytes_sent == round(sent / phases)
    assert not overlap(lane(timeline, "link world"))
    assert not overlap(lane(timeline, *(("compute", "method") if case["shared_compute"] else ("compute",))))
    total = timeline.step_seconds * phases
    assert all(e.start_seconds >= 0 and e.end_seconds <= total + 1e-9 for e in timeline.events)
    assert {e.lane for e in timeline.events} <= set(LANES)
    assert -1e-9 <= timeline.exposed_seconds <= timeline.step_seconds + 1e-9
    longest = max(compute + (work / phases if case["shared_compute"] else 0.0), priced / phases)
    assert longest - 1e-9 <= timeline.step_seconds <= compute + (priced + work) / phases + 1e-9


@pytest.mark.parametrize(
    "method", [SSGD(), Cast(), TopK(0.01), ACP(), SignSGD(), PowerSGD(fusion=1)], ids=lambda m: m.name
)
@pytest.mark.parametrize("shared", [True, False])
def test_more_bandwidth_is_never_slower(method, shared):
    profile = builtin("bert-base", batch_size=4)
    before = float("inf")
    for bits in (1e7, 1e8, 3e8, 1e9, 1e10, 1e11):
        costs = Costs.of_link(bits, 1e-4, 8)
        seconds = simulate(method, profile, Topology(8), costs, shared_compute=shared).step_seconds
        assert seconds <= before * (1 + 1e-9)
        before = seconds


def test_machines_with_several_ranks():
    profile = profile_of([240] * 6, [0.01] * 6)
    costs = Costs.of_link(1e6, 1e-3, 12, 4, node_bits_per_second=2e6)
    timeline = simulate(Hierarchical(), profile, Topology(12, 4), costs)
    inside, across = lane(timeline, "link node"), lane(timeline, "link cross")
    assert [e.name for e in across] == ["AllReduce"] * 6
    assert sorted({e.name for e in inside}) == ["AllGather", "ReduceScatter"]
    assert overlap([*inside, *across])  # two links
    assert not overlap(inside)
    assert busy(across) == pytest.approx(6 * costs.seconds("AllReduce", "cross", 3, 240))
    uneven = simulate(Hierarchical(), profile, Topology(12, [3, 4, 5]), costs)  # as seen from the machine with five
    assert busy(lane(uneven, "link node")) == pytest.approx(
        6 * (costs.seconds("ReduceScatter", "node", 5, 960) + costs.seconds("AllGather", "node", 5, 4 * (240 // 5)))
    )
    both = simulate(SSGD(fusion="none"), profile, Topology(4, 4), Costs.of_link(1e6, 1e-3, 4, 4))
    assert lane(both, "link world")


def test_the_card_is_shared():
    """WORLD and CROSS never at the same time; on one machine WORLD and NODE."""
    plan = Plan.of([[f"m{i}.w"] for i in range(6)])
    plan = Plan((tuple(type(b)(b.names, dense=i % 2 == 1) for i, b in enumerate(plan.phases[0])),))
    profile = profile_of([240] * 6, [0.0] * 6)
    for topology, other in ((Topology(12, 4), "link cross"), (Topology(4, 4), "link node")):
        costs = Costs.of_link(1e6, 1e-3, topology.world_size, 4)
        timeline = simulate(Hierarchical(), profile, topology, costs, plan=plan, dense=SSGD())
        assert len(lane(timeline, "link world")) == 3
        assert not overlap(lane(timeline, "link world", other))
        assert simulate(Hierarchical(), profile, topology, costs, plan=plan) == timeline
