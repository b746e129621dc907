"""Three ways to one sum: equal on every layout, in a mixed plan too; bytes; what is refused."""

import pytest
import torch
from worlds import draw

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import CROSS, LocalWorld, Plan, PlanBucket, Topology
from thinwire.core.program.trace import trace

LAYOUTS = [(1, 4), (2, 2), (4, 1), (2, 3), (3, 4)]
SHAPES = {"w": (5, 3), "d < n": (1,), "empty": (0, 2), "b": (7,)}
WAYS = ["three_phase", "torus"]


def whole(seed, shapes, ranks):
    """Integer gradients, a multiple of the ranks: every order of adding gives the same bits."""
    return [{n: ((4 * x).round() * ranks).float() for n, x in g.items()} for g in draw(seed, shapes, ranks)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nodes,ranks", LAYOUTS)
@pytest.mark.parametrize("plan", [None, [list(SHAPES)]], ids=["apart", "together"])
def test_every_way_gives_the_same_sum(way, nodes, ranks, plan):
    size = nodes * ranks
    gradients = whole(nodes, SHAPES, size)
    flat = LocalWorld(size, ranks, plan=plan).step(SSGD(), gradients)
    other = LocalWorld(size, ranks, plan=plan).step(SSGD(collective=way), gradients)
    for rank in range(size):
        assert all(torch.equal(flat[0][name], other[rank][name]) for name in SHAPES)


@pytest.mark.parametrize("way", WAYS)
def test_other_methods_take_the_same_way(way):
    shapes = {"w": (12, 9), "b": (5,)}
    for make in (lambda c: Cast("fp16", collective=c), lambda c: ACP(rank=2, min_rate=1, collective=c)):
        worlds = [LocalWorld(6, 3, plan=[["w", "b"]]) for _ in range(2)]
        for step in range(4):
            gradients = draw(step, shapes, 6)
            flat, other = (world.step(make(c), gradients) for world, c in zip(worlds, ("flat", way)))
            for rank in range(6):
                for name in shapes:
                    assert torch.equal(other[0][name], other[rank][name])
                    torch.testing.assert_close(flat[0][name], other[rank][name], rtol=1e-2, atol=1e-3)


def test_uneven_nodes_have_leaders_but_no_torus():
    gradients = whole(0, SHAPES, 5)
    world = LocalWorld(5, [3, 2])
    flat, other = world.step(SSGD(), gradients), world.step(SSGD(collective="three_phase"), gradients)
    assert all(torch.equal(flat[0][name], other[4][name]) for name in SHAPES)
    with pytest.raises(ValueError, match='use collective="three_phase"'):
        world.step(SSGD(collective="torus"), gradients)


def test_a_plan_decides_per_bucket():
    names = list(SHAPES)
    choices = ("torus", "", "three_phase", "flat")
    plan = Plan((tuple(PlanBucket((n,), collective=c) for n, c in zip(names, choices)),))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.hash != Plan.of([[n] for n in names]).hash
    gradients = whole(3, SHAPES, 6)
    mixed = LocalWorld(6, 2, plan=plan).step(SSGD(), gradients)
    flat = LocalWorld(6, 2).step(SSGD(), gradients)
    assert all(torch.equal(mixed[r][n], flat[0][n]) for r in range(6) for n in names)
    assert PlanBucket(("w",), collective="torus").applied(SSGD()) == SSGD(collective="torus")
    assert PlanBucket(("w",)).applied(SSGD(collective="torus")) == SSGD(collective="torus")


def test_bytes_across_the_nodes():
    d, topology = 1200, Topology(12, 3)
    across = {}
    for way in ("flat", "three_phase", "torus"):
        steps = trace(SSGD(collective=way), [("w", (d,))], topology)
        across[way] = sum(step.sent_bytes for step in steps if step.scope is CROSS)
    assert across == {"flat": 0, "three_phase": 2 * 3 * 4 * d // 4, "torus": 2 * 3 * 4 * (d // 3) // 4}
    silent = trace(SSGD(collective="three_phase"), [("w", (d,))], topology, rank=1)
    assert [step.kind for step in silent] == ["AllReduce", "Broadcast"]


def test_the_published_threshold():
    topology = Topology(8, 2)
    kinds = lambda d: [s.kind for s in trace(SSGD(collective="threshold:0.004"), [("w", (d,))], topology)]  # noqa: E731
    assert kinds(1000) == ["AllReduce", "AllReduce", "Broadcast"]
    assert kinds(1001) == ["AllReduce"]
    assert [s.kind for s in trace(SSGD(collective="auto"), [("w", (9,))], topology)] == ["AllReduce"]
