"""HiTopK on layouts of nodes: nothing is lost, only owed; bytes by scope; one bad element reaches every rank."""

import pytest
import torch
from worlds import draw, mean

from thinwire.core.kernels import pairs
from thinwire.core.kernels.select import keep_count
from thinwire.core.methods.hitopk import HiTopK
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld, Plan, Topology
from thinwire.core.program.ops import CROSS, NODE
from thinwire.core.program.trace import trace

LAYOUTS = [(2, 2), (4, 1), (2, 3), (3, 4), (1, 4)]
BUCKETS = {
    "d = 113 over two tensors": {"w": (12, 9), "b": (5,), "empty": (0, 3)},
    "d < n": {"s": (), "one": (1,)},
}


def lost(world, method, steps, shapes, replan=None):
    """The largest violation of the law: sum of residuals + P G = sum of residuals before + gradients."""
    before = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    worst = 0.0
    for step in range(steps):
        if replan is not None and step == steps // 2:
            world.plan = Plan.of(*[replan])
        gradients = draw(step, shapes, world.size)
        out = world.step(method, gradients)
        assert all(torch.equal(out[0][name], other[name]) for other in out for name in shapes)
        found = world.residuals()
        zero = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        after = {name: sum((r.get(name, zero[name]) for r in found), zero[name]) for name in shapes}
        for name in shapes:
            total = before[name] + sum(g[name] for g in gradients)
            gap = after[name] + world.size * out[0][name] - total
            worst = max(worst, float(gap.abs().max()) if gap.numel() else 0.0)
        before = after
    return worst


@pytest.mark.parametrize("shapes", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("nodes,ranks", LAYOUTS)
@pytest.mark.parametrize("method", [HiTopK(0.1), HiTopK(0.4, value_dtype="fp16"), HiTopK(1.0)], ids=str)
def test_nothing_is_lost(method, nodes, ranks, shapes):
    world = LocalWorld(nodes * ranks, ranks, plan=[list(shapes)])
    assert lost(world, method, 12, shapes, replan=[[name] for name in shapes]) <= 1e-12


@pytest.mark.parametrize("nodes,ranks", [(2, 2), (2, 3), (3, 4)])
def test_the_law_tells_a_scatter_that_overwrites(nodes, ranks, monkeypatch):
    def overwrite(out, values, indices):
        for v, i in zip(values.unbind(), indices.unbind()):
            out[i] = v
        return out

    monkeypatch.setattr(pairs, "add_pairs", overwrite)  # as published code does it
    assert lost(LocalWorld(nodes * ranks, ranks), HiTopK(0.3), 12, {"w": (12, 9)}) > 1e-3


@pytest.mark.parametrize("nodes,ranks", LAYOUTS)
def test_density_one_is_the_average(nodes, ranks):
    size, shapes = nodes * ranks, {"w": (12, 9), "b": (5,)}
    world, exact = (LocalWorld(size, ranks, plan=[["w", "b"]]) for _ in range(2))
    for step in range(10):
        gradients = [{name: (8 * x).round() for name, x in g.items()} for g in draw(step, shapes, size)]
        want = mean(gradients)
        got = world.step(HiTopK(1.0), gradients)[0]
        plain = exact.step(SSGD(), gradients)[0]
        for name in shapes:
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(plain[name], want[name], rtol=1e-12, atol=1e-12)
    assert all((r == 0).all() for found in world.residuals() for r in found.values())


def test_one_rank_on_each_node_is_top_k():
    worlds = [LocalWorld(4, plan=[["w", "b"]]) for _ in range(2)]
    for step in range(6):
        gradients = draw(step, {"w": (12, 9), "b": (5,)}, 4)
        a, b = worlds[0].step(HiTopK(0.1), gradients)[0], worlds[1].step(TopK(0.1), gradients)[0]
        assert all(torch.equal(a[name], b[name]) for name in a)
    for mine, theirs in zip(worlds[0].residuals(), worlds[1].residuals()):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("nodes,ranks", [(2, 2), (4, 1), (2, 3), (3, 4)])
def test_bytes_by_scope(nodes, ranks):
    d, method, size = 997, HiTopK(0.02), nodes * ranks
    shard = -(-d // ranks)
    kept = keep_count(shard, 0.02)
    steps = trace(method, [("w", (d,))], Topology(size, ranks))
    across = sum(step.sent_bytes for step in steps if step.scope is CROSS)
    inside = sum(step.sent_bytes for step in steps if step.scope is NODE)
    assert across == (nodes - 1) * 8 * kept
    assert inside == 2 * (ranks - 1) * 4 * shard
    world = LocalWorld(size, ranks)
    world.step(method, draw(0, {"w": (d,)}, size, torch.float32))
    assert world.bytes_sent() == [across + inside] * size
    half = trace(HiTopK(0.02, value_dtype="bf16"), [("w", (d,))], Topology(size, ranks))
    assert sum(step.sent_bytes for step in half if step.scope is CROSS) == (nodes - 1) * (4 * kept + -(-kept // 2) * 4)


@pytest.mark.parametrize(
    ("nodes", "ranks", "bad"), [(2, 2, torch.nan), (4, 1, torch.inf), (2, 3, -torch.inf), (1, 4, torch.nan)]
)
def test_one_bad_element_stops_the_step_everywhere(nodes, ranks, bad):
    size, shapes = nodes * ranks, {"w": (12, 9), "b": (5,)}
    world = LocalWorld(size, ranks)  # a bucket each: one of them is clean
    world.step(HiTopK(0.1), draw(0, shapes, size))
    before = world.residuals()
    gradients = draw(1, shapes, size)
    gradients[size - 1]["w"][7, 3] = bad
    out = world.step(HiTopK(0.1), gradients)
    assert all(not x["w"].isfinite().all() for x in out)
    for old, new in zip(before, world.residuals()):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_node_of_fp16_gradients_does_not_overflow():
    world = LocalWorld(4, 2)
    value = torch.full((64,), 40000.0, dtype=torch.float16)
    out = world.step(HiTopK(1.0), [{"w": value}] * 4)
    torch.testing.assert_close(out[0]["w"], value)


def test_each_rank_keeps_its_shard_alone():
    world = LocalWorld(6, 3, plan=[["w", "b"]])
    world.step(HiTopK(0.1), draw(0, {"w": (12, 9), "b": (5,)}, 6))
    held = [sum(r.numel() for r in state.residuals.values()) for state in world.states]
    assert held == [38, 38, 37] * 2  # 113 elements in shards of 38, the last padded
    assert [r["w"].shape for r in world.residuals() if "w" in r] == [(12, 9)] * 6


def test_uneven_nodes_are_refused():
    with pytest.raises(ValueError, match="use TopK, which works with any layout"):
        LocalWorld(5, [3, 2]).step(HiTopK(0.1), draw(0, {"w": (4, 4)}, 5))
