"""QSGD, TernGrad, Cast in 8, 4 and 2 bits, and 1-bit SGD against brute force in numpy, and the rules that all keep."""

import numpy as np
import pytest
import torch
from worlds import PLAN, SHAPES, draw, label

from thinwire import OneBit
from thinwire.core.kernels.seeding import noise
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.program import LocalWorld, Topology
from thinwire.core.program.trace import trace

UNBIASED = [QSGD(), QSGD(bits=2, block=64, norm="l2"), QSGD(bits=8, seed=3), TernGrad(clip=None)]
ALL = [
    *UNBIASED,
    TernGrad(),
    Cast("int8"),
    Cast("int8", block=8),
    Cast("int4"),
    Cast("int2", block=16),
    Cast("int1", block=16),
    OneBit(),
]


def uniform(n, method, name, step, rank):
    k = noise(n, method.seed, name, step, rank, device=torch.device("cpu"))
    return (k.numpy().astype(np.float64) + 32768.5) / 65536


def linear(a, block, bits):
    """8 or 4 bits and back, block by block."""
    out, s = np.zeros_like(a), 2 ** (bits - 1) - 1
    for start in range(0, len(a), block):
        v = a[start : start + block]
        scale = np.abs(v).max() / s
        out[start : start + block] = np.round(v / scale) * scale if scale else 0
    return out


def binned(a, block):
    """2 bits: equal bins around 0 in units of each block's root mean square; a bin stands for its weighted mean."""
    v = np.pad(a, (0, -len(a) % block)).reshape(-1, block)
    unit = np.sqrt((v**2).mean(1, keepdims=True))
    bins = np.clip(np.floor(v / np.where(unit, unit, 1) / 0.9957) + 2, 0, 3)
    out = np.zeros_like(v)
    for b in range(4):
        here = bins == b
        squares = (here * unit**2).sum()
        out += here * unit * ((here * v * unit).sum() / squares if squares else 0)
    return out.reshape(-1)[: len(a)]


def by_chunks(a, block, chunk, code):
    return np.concatenate([code(np.pad(a[i : i + chunk], (0, max(0, i + chunk - len(a)))), block)
                           for i in range(0, len(a), chunk)])[: len(a)]  # fmt: skip


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", UNBIASED[:3], ids=label)
def test_qsgd_is_the_mean_of_the_ranks_codes(method):
    world, shape = LocalWorld(3), (23, 29)
    for step in range(2):
        gradients = draw(step, {"w": shape}, 3)
        want = 0.0
        for rank, g in enumerate(gradients):
            v, u = g["w"].numpy().reshape(-1), uniform(23 * 29, method, "w", step, rank)
            s = 2 ** (method.bits - 1) - 1
            for start in range(0, v.size, method.block):
                here = slice(start, start + method.block)
                top = np.abs(v[here]).max() if method.norm == "max" else np.linalg.norm(v[here])
                part = np.zeros_like(v)
                part[here] = np.floor(v[here] / top * s + u[here]) * top / s
                want = want + part / 3
        for rank in world.step(method, gradients):
            np.testing.assert_allclose(rank["w"].numpy().reshape(-1), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", [TernGrad(), TernGrad(clip=1.0), TernGrad(clip=None, seed=5)], ids=label)
def test_terngrad_sums_codes_of_the_shared_scale(method):
    world = LocalWorld(3)
    for step in range(2):
        gradients = draw(step, {"w": (23, 29)}, 3)
        v = [g["w"].numpy().reshape(-1) for g in gradients]
        own = [np.abs(x).max() for x in v]
        if method.clip is not None:
            own = [min(top, method.clip * np.sqrt(np.mean(x**2))) for top, x in zip(own, v)]
        codes = [
            np.floor(np.clip(x, -top, top) / max(own) + uniform(x.size, method, "w", step, rank))
            for rank, (x, top) in enumerate(zip(v, own))
        ]
        for rank in world.step(method, gradients):
            np.testing.assert_allclose(rank["w"].numpy().reshape(-1), max(own) / 3 * sum(codes), rtol=0, atol=1e-13)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("ranks", "n"), [(1, 64), (2, 667), (3, 1), (3, 64), (5, 7), (8, 7), (8, 667)])
def test_few_bits_in_two_steps(bits, ranks, n):
    method, world = Cast(f"int{bits}", block=16), LocalWorld(ranks)
    owed = [np.zeros(n) for _ in range(ranks)]
    gathers = ranks <= 2  # two ranks gather whole messages, and encode no sum
    chunk = n if gathers else -(-n // ranks)
    blocks = -(-chunk // 16)
    size = -(-chunk // blocks)  # equal blocks of at most 16
    if bits < 8:
        size = -(-size // 8) * 8
    chunk = blocks * size

    def code(x, block):
        return binned(x, block) if bits == 2 else linear(x, block, bits)

    for step in range(3):
        gradients = draw(step, {"w": (n,)}, ranks)
        a = [g["w"].numpy() + e for g, e in zip(gradients, owed)]
        sent = [by_chunks(x, size, chunk, code) for x in a]
        padded = [np.concatenate([code(np.pad(x[i : i + chunk], (0, max(0, i + chunk - n))), size)
                                  for i in range(0, n, chunk)]) for x in a]  # fmt: skip
        total = np.sum(padded, axis=0)
        again = total if gathers else by_chunks(total, size, chunk, code)
        for rank, out in enumerate(world.step(method, gradients)):
            np.testing.assert_allclose(out["w"].numpy(), again[:n] / ranks, rtol=0, atol=1e-13)
            mine = slice(rank * chunk, min(n, (rank + 1) * chunk))
            owed[rank] = a[rank] - sent[rank]
            owed[rank][mine] += (total[:n] - again[:n])[mine]
            np.testing.assert_allclose(world.residuals()[rank]["w"].numpy(), owed[rank], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("bits", "most", "growth"), [(8, 0.03, 1.3), (4, 0.6, 1.5), (2, 5.0, 1.5)])
def test_residuals_of_few_bits_stay_small(bits, most, growth):
    world, gradients = LocalWorld(4), draw(0, {"w": (60, 50)}, 4)
    norms, longest = [], max(float(g["w"].norm()) for g in gradients)
    for _ in range(200):
        world.step(Cast(f"int{bits}"), gradients)
        norms.append(max(float(r["w"].norm()) for r in world.residuals()))
    assert max(norms) <= most * longest
    assert max(norms[100:]) <= growth * max(norms[:100])


def test_one_bit_is_sign_sgd_with_two_levels():
    worlds = [LocalWorld(3), LocalWorld(3)]
    for step in range(4):
        gradients = draw(step, ranks=3)
        a, b = (w.step(m, gradients)[1] for w, m in zip(worlds, (OneBit(), SignSGD(levels=2))))
        assert all(torch.equal(a[name], b[name]) for name in SHAPES)


# --- mean and variance --------------------------------------------------------------------------------------------

DRAWS = 4000
# Of 512 normal elements: the variance over the squared norm, computed by numerical integration of the formula.
RELATIVE = {
    ("l2", 2): 17.0,
    ("l2", 4): 1.57,
    ("l2", 8): 5.2e-3,
    ("max", 2): 1.53,
    ("max", 4): 0.036,
    ("max", 8): 1.1e-4,
}


def errors(method, v, ranks=1):
    """What is applied minus v, for as many independent draws as rows: all rows are v, each a block."""
    g = {"w": v.expand(DRAWS, -1).contiguous()}
    return LocalWorld(ranks).step(method, [g] * ranks)[0]["w"] - v


def judge(found, variance):
    assert found.mean(0).square().sum() <= 1.5 * variance / DRAWS
    assert found.square().sum(1).mean() == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased_with_the_variance_of_the_formula(bits, norm):
    v = draw(1, {"w": (512,)})[0]["w"]
    top, s = (v.abs().max() if norm == "max" else v.norm()), 2 ** (bits - 1) - 1
    fraction = (v.abs() / top * s) % 1
    variance = ((top / s) ** 2 * fraction * (1 - fraction)).sum().item()
    judge(errors(QSGD(bits=bits, norm=norm), v), variance)
    assert variance / v.square().sum().item() == pytest.approx(RELATIVE[norm, bits], rel=0.25)
    if norm == "l2":
        assert variance <= min(512 / s**2, 512**0.5 / s) * v.square().sum()


def test_terngrad_is_unbiased_with_the_variance_of_the_formula():
    v = draw(1, {"w": (256,)})[0]["w"]
    judge(errors(TernGrad(clip=None), v), (v.abs() * (v.abs().max() - v.abs())).sum().item())


@pytest.mark.parametrize("method", [QSGD(bits=2), TernGrad(clip=None)], ids=label)
def test_ranks_draw_independently(method):
    v = draw(2, {"w": (512,)})[0]["w"]
    one, four = (errors(method, v, ranks).square().sum(1).mean().item() for ranks in (1, 4))
    assert four == pytest.approx(one / 4, rel=0.05)


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", UNBIASED, ids=label)
def test_other_plans_and_resumed_runs_draw_the_same(method):
    worlds = [LocalWorld(3, plan=PLAN), LocalWorld(3), LocalWorld(3, plan=[list(SHAPES)])]
    for step in range(4):
        gradients = draw(step, ranks=3)
        if step == 2:
            resumed = LocalWorld(3, plan=[list(reversed(SHAPES))])
            for state, old in zip(resumed.states, worlds[0].states):
                state.restore(old.snapshot())
            worlds.append(resumed)
        outs = [world.step(method, gradients) for world in worlds]
        for out in outs[1:]:
            assert all(torch.equal(out[r][n], outs[0][r][n]) for r in range(3) for n in SHAPES)


@pytest.mark.parametrize("method", UNBIASED, ids=label)
def test_steps_and_names_draw_anew(method):
    g = draw(0, {"w": (40, 40)})[0]["w"]
    world = LocalWorld(1)
    first, second = (world.step(method, [{"w": g, "v": g}])[0] for _ in range(2))
    assert not torch.equal(first["w"], first["v"])
    assert not torch.equal(first["w"], second["w"])


@pytest.mark.parametrize("method", ALL, ids=label)
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(1, torch.float32), (2, torch.float64), (3, torch.bfloat16), (5, torch.float16), (8, torch.float32)],
)
def test_all_ranks_agree_and_are_near_the_mean(method, ranks, dtype):
    world, gradients = LocalWorld(ranks, plan=PLAN), draw(0, ranks=ranks, dtype=dtype)
    gradients[-1]["w"] = None if ranks > 1 else gradients[-1]["w"]
    for g in gradients:
        g["conv"] = g["conv"].to(memory_format=torch.channels_last)
        g["row"] = None if ranks > 1 else g["row"]  # used by nobody
    if ranks > 1:
        world.step(method, draw(1, ranks=ranks, dtype=dtype))  # shapes become known
        for state in world.states:
            state.residuals.clear()
    out = world.step(method, gradients)
    assert all(torch.equal(out[0][n], other[n]) for other in out for n in SHAPES)
    assert all(out[0][n].dtype == dtype for n in SHAPES)
    for name, shape in SHAPES.items():
        seen = [torch.zeros(shape) if g[name] is None else g[name].float() for g in gradients]
        largest = max((x.abs().max().item() for x in seen if x.numel()), default=0.0)
        error = (out[0][name].float() - sum(seen) / ranks).abs()
        if method in (Cast("int1", block=16), Cast("int2", block=16)):  # no code is 0: a block says how far it is off
            assert error.numel() == 0 or error.max() <= 6  # of draws from a Gaussian
            continue
        assert (error <= 3.1 * largest + 1e-6).all()  # a level of two bits and "l2" is the whole norm
        if largest == 0:
            assert (out[0][name] == 0).all()


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes(ranks):
    shapes, others = {"w": (30, 7), "b": (5,), "s": ()}, ranks - 1

    def sent(method):
        world = LocalWorld(ranks, plan=[list(shapes)])
        world.step(method, draw(0, shapes, ranks, torch.float32))
        assert len(set(world.bytes_sent())) == 1
        return world.bytes_sent()[0]

    def whole(*parts):  # in words of 16 bytes
        return sum(size + -size % 16 for size in parts)

    for bits, codes in ((2, 53 + 2 + 1), (4, 105 + 3 + 1), (8, 216)):
        assert sent(QSGD(bits=bits, block=64)) == others * (4 * (4 + 1 + 1) + codes)
    assert sent(TernGrad()) == others * 3 * 4 + round(2 * others * 216 / ranks)
    times = {2: 1, 3: 2, 8: 2}[ranks]  # two ranks gather the whole; more send a chunk of it twice
    blocks = {2: 14, 3: 5, 8: 2}[ranks]  # 216, 72, 27 elements a chunk, in blocks of 16, 15 and 14
    chunk = {2: 224, 3: 75, 8: 28}[ranks]
    assert sent(Cast("int8", block=16)) == times * others * whole(4 * blocks, chunk)
    codes = 16 * blocks  # whole bytes of codes: 224, 80 and 32 elements
    assert sent(Cast("int4", block=16)) == times * others * whole(4 * blocks, codes // 2)
    assert sent(Cast("int2", block=16)) == times * others * whole(4 * (blocks + 4), codes // 4)
    assert sent(Cast("int1", block=16)) == others * whole(4 * (14 + 2), 224 // 8)  # all gather all


@pytest.mark.parametrize("method", [QSGD(), TernGrad()], ids=lambda m: m.name)
def test_little_padding_is_sent_and_changes_nothing(method):
    shapes = {"a": (512 * 100 - 1,), "b": (512 * 60 - 7,)}
    gradients = draw(0, shapes, 2, torch.float32)
    together = LocalWorld(2, plan=[["a", "b"]])
    out = together.step(method, gradients)
    if method.name == "qsgd":
        assert together.bytes_sent()[0] == 160 * (4 + 256)
    for g in gradients:
        g["c"] = torch.ones(1)  # with it, padding is cut off
    again = LocalWorld(2, plan=[["a"], ["c", "b"]]).step(method, gradients)
    assert all(torch.equal(out[rank][name], again[rank][name]) for rank in range(2) for name in "ab")


def test_bytes_of_a_large_tensor_follow_the_formulas():
    n, ranks = 1 << 20, 16
    (gather,) = trace(QSGD(), [("w", (n,))], Topology(ranks))
    assert gather.sent_bytes == 15 * (n // 2 + 4 * n // 512)
    two = trace(Cast("int8"), [("w", (n,))], Topology(ranks))
    assert [step.kind for step in two] == ["AllToAll", "AllGather"]
    assert sum(step.sent_bytes for step in two) == 4 * (n / 2) * (1 + 4 / 256) * 15 / 16
    scales, codes = trace(TernGrad(), [("w", (n,))], Topology(ranks))
    assert (scales.message_bytes, codes.message_bytes) == (4, n)


def test_payload():
    shapes = [(30, 7), (5,), (), (0, 2)]
    assert QSGD(block=64).payload(shapes, 0) == [27 + 4, 2, 2, 0]
    assert TernGrad().payload(shapes, 0) == [54, 3, 2, 0]
    assert Cast("int8", block=64).payload(shapes, 0) == [53 + 4, 3, 2, 0]
    assert Cast("int2", block=64).payload(shapes, 0) == [14 + 4, 2, 2, 0]
    assert Cast("int1", block=64).payload(shapes, 0) == [7 + 4, 2, 2, 0]
    assert Cast().payload(shapes, 0) == [105, 3, 1, 0]


def test_error_feedback_of_int8_needs_its_memory():
    assert Cast("int8").has_residual
    assert not Cast("int8").cheap_pack
    assert not Cast().has_residual


# --- ends of the range --------------------------------------------------------------------------------------------


def test_a_tensor_of_one_element_or_one_value_is_not_clamped_away():
    out = LocalWorld(1).step(TernGrad(clip=1.0), [{"s": torch.tensor(3.0), "c": torch.full((9,), -2.0)}])[0]
    assert out["s"] == 3
    assert (out["c"] == -2).all()


def test_too_many_ranks_for_int8_sums():
    for call in (
        lambda: LocalWorld(128).step(TernGrad(), [{"w": torch.ones(2)}] * 128),
        lambda: TernGrad().compute_seconds([(2,)], 0, Topology(128), None),
    ):
        with pytest.raises(ValueError, match=r"127 ranks, not 128: use QSGD\(bits=2\)"):
            call()
    extreme = LocalWorld(127).step(TernGrad(), [{"w": torch.tensor([1.0, -1.0])}] * 127)
    torch.testing.assert_close(extreme[0]["w"], torch.tensor([1.0, -1.0]))
