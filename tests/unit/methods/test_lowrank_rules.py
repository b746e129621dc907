"""Which tensors are compressed, what is sent, and that ranks which drifted apart are found."""

import math

import pytest
import torch
from worlds import draw, label

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.pricing.costs import Costs, assumed_compute
from thinwire.core.pricing.merge import fuse
from thinwire.core.program import LocalWorld, Topology
from thinwire.core.program.trace import trace


def test_who_is_compressed():
    acp, power = ACP(rank=4), PowerSGD(rank=4)
    assert acp.rank_of((64, 64)) == power.rank_of((64, 64)) == 4
    assert acp.rank_of((16, 16)) == 4  # 4 * 32 / 2 * 2 = 128 < 256
    assert power.rank_of((16, 16)) == 0  # 4 * 32 * 2 = 256
    assert acp.rank_of((4, 1000)) == acp.rank_of((100,)) == acp.rank_of(()) == acp.rank_of((0, 9)) == 0
    assert acp.rank_of((64, 32, 3, 3)) == 4
    full = ACP(rank=32, compress="matrices")
    assert full.rank_of((10, 100)) == 10
    assert full.rank_of((64, 3, 7, 7)) == 32
    assert full.rank_of((100,)) == 0


def test_payload():
    shapes = [(64, 32, 3, 3), (64,), (10, 512), (2, 2)]
    acp = ACP(rank=4)
    assert acp.payload(shapes, 0) == [4 * 64, 64, 4 * 10, 4]
    assert acp.payload(shapes, 1) == [4 * 288, 64, 4 * 512, 4]
    assert PowerSGD(rank=4).payload(shapes, 0) == [4 * (64 + 288), 64, 4 * 522, 4]


def resnet50():
    """Parameter shapes in registration order."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def test_fusion_table_resnet50():
    shapes = resnet50()[::-1]
    sizes = [math.prod(s) for s in shapes]
    dense, threshold, mib = sum(sizes), 25 * 2**20 / 4, 2**20 / 4
    assert round(dense / 1e6, 3) == 25.557
    method = ACP(rank=4, compress="matrices")
    p, q = method.payload(shapes, 0), method.payload(shapes, 1)
    assert [round(sum(x) / mib, 3) for x in (p, q)] == [0.627, 1.045]
    vectors = sum(n for n, s in zip(sizes, shapes) if len(s) == 1)
    assert round(dense / (sum(p) + sum(q) - vectors), 1) == 66.5
    assert [round(dense / sum(x), 1) for x in (p, q)] == [155.5, 93.3]
    limits = [threshold * sum(x) / dense for x in (p, q)]
    assert [round(x / mib, 3) for x in limits] == [0.161, 0.268]
    groups = [fuse(sizes, threshold), fuse(p, limits[0]), fuse(q, limits[1])]
    assert [len(g) for g in groups] == [5, 4, 4]
    default = ACP(rank=4)
    assert default.payload(shapes, 0) == p
    assert default.payload(shapes, 1) == q


def test_bytes_per_parity():
    world, shapes, sent = LocalWorld(4, plan=[["w", "b"]]), {"w": (64, 32), "b": (5,)}, 0
    method = ACP(rank=4, verify_every=0)
    for step in range(4):
        world.step(method, draw(step, shapes, 4, torch.float32))
        elements = sum(method.payload(list(shapes.values()), step % 2))
        assert world.bytes_sent()[0] - sent == round(2 * 3 / 4 * 4 * elements)
        sent = world.bytes_sent()[0]


def test_ordered_sends_the_same_bytes_and_ignores_bucket_boundaries():
    shapes = {"w": (16, 16), "v": (12, 20), "b": (4,)}
    plans = [[["w", "v", "b"]], [["w"], ["v"], ["b"]]]
    worlds = [LocalWorld(3, plan=plan) for plan in plans]
    for step in range(5):
        outs = [world.step(ACP(rank=2, min_rate=1, deterministic=True), draw(step, shapes, 3)) for world in worlds]
        assert all(torch.equal(outs[0][0][n], outs[1][0][n]) for n in shapes)
    shapes = {"a": (24, 16), "b": (24, 16), "c": (40, 12), "d": (7,)}  # two of one shape are orthogonalised at once
    worlds = [LocalWorld(2, plan=plan) for plan in ([[*shapes]], [[name] for name in shapes])]
    for step in range(6):
        gradients = draw(step, shapes, 2, torch.float32)
        outs = [world.step(ACP(rank=4, deterministic=True), gradients)[0] for world in worlds]
        assert all(torch.equal(outs[0][name], outs[1][name]) for name in shapes)
    kinds = [step.kind for step in trace(ACP(rank=2, deterministic=True), list(shapes.items()), Topology(3))]
    assert kinds == ["ReduceScatter", "AllGather"]


@pytest.mark.parametrize("method", [ACP(rank=2), PowerSGD(rank=2)], ids=label)
def test_collectives_of_a_bucket(method):
    def kinds(*shapes):
        return [s.kind for s in trace(method, [(str(i), s) for i, s in enumerate(shapes)], Topology(4), step=3)]

    assert kinds((64, 64), (9,)) == ["AllReduce"] * (1 if method.name == "acp" else 2)
    assert kinds((9,), (2, 2), ()) == ["AllReduce"]
    assert kinds((0, 4), (0,)) == []


@pytest.mark.parametrize("kind", [ACP, PowerSGD])
def test_a_flipped_bit_is_found(kind):
    method = kind(rank=2, verify_every=4, min_rate=1)
    world = LocalWorld(3, plan=[["w", "v"]])
    for step in range(4):
        world.step(method, draw(step, {"w": (16, 16), "v": (12, 20)}, 3))
    basis = world.states[1].shared("q", "v").clone()
    basis.view(torch.int64)[3, 1] ^= 1
    world.states[1].fields["q", "v"] = basis
    with pytest.raises(RuntimeError, match="bases of v differ between ranks at step 4"):
        world.step(method, draw(9, {"w": (16, 16), "v": (12, 20)}, 3))


def test_another_seed_is_another_subspace_and_the_rank_may_change():
    gradients = draw(0, {"w": (16, 16)}, 2)
    outs = [LocalWorld(2).step(ACP(rank=2, seed=seed), gradients)[0]["w"] for seed in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    world = LocalWorld(2)
    for step, rank in enumerate((2, 2, 3, 3)):
        world.step(ACP(rank=rank), draw(step, {"w": (16, 16)}, 2))
    assert world.states[0].shared("q", "w").shape == (16, 3)


@pytest.mark.parametrize(
    "method",
    [ACP(rank=2, min_rate=1), ACP(rank=2, min_rate=1, decoupled=True), PowerSGD(rank=2, min_rate=1)],
    ids=label,
)
def test_ranks_that_round_differently_use_the_first_ranks_bases(method, monkeypatch):
    """Each rank's orthogonalisation errs in its own way, as on processors of several kinds."""
    one = "thinwire.core.methods." + ("acp" if method.name == "acp" else "powersgd")
    import importlib

    module, calls = importlib.import_module(one), iter(range(10**6))
    exact = module.orthogonalise_all

    def rounded(flat, shapes):
        return [x * (1 + 1e-3 * (next(calls) % 7)) for x in exact(flat, shapes)]

    def run(method):
        world = LocalWorld(3, plan=[["w", "v"]])
        for step in range(5):
            outs = world.step(method, draw(step, {"w": (16, 16), "v": (12, 20)}, 3))
        return max(float((outs[0][name] - out[name]).abs().max()) for out in outs for name in out)

    assert method.on_mixed_processors().bases_from_first
    monkeypatch.setattr(module, "orthogonalise_all", rounded)
    assert run(method.on_mixed_processors()) == 0
    with pytest.raises(RuntimeError, match="bases_from_first=True"):  # and without it the check finds them
        run(method)


@pytest.mark.parametrize("method", [ACP(rank=2), PowerSGD(rank=2)], ids=label)
def test_bases_from_the_first_rank_are_priced_and_traced(method):
    mixed, shapes = method.on_mixed_processors(), [("w", (64, 64)), ("b", (9,))]
    kinds = [one.kind for one in trace(mixed, shapes, Topology(4), step=3)]
    assert kinds == ["AllReduce", "Broadcast"] * (1 if method.name == "acp" else 2)
    sizes = [shape for _, shape in shapes]
    costs = Costs({}, assumed_compute())
    assert len(mixed.compute_seconds(sizes, 0, Topology(4), costs)) == len(kinds) + 1
