"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

from importlib import import_module

import torch

from thinwire.core.kernels import pairs
from thinwire.core.kernels.finite import all_finite, every_finite
from thinwire.core.kernels.orthogonal import orthogonalise_all
from thinwire.core.kernels.quantise.bins import TILE, encode_bins, means_of_sides, pack_signs
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.quantise.linear import encode
from thinwire.core.kernels.seeding import noise
from thinwire.core.kernels.symmetric import packed_times, unpacked
from thinwire.core.kernels.tables import choose
from thinwire.core.methods.rows import Rows
from thinwire.core.methods.terngrad import magnitudes
from thinwire.core.program import Slot
from thinwire.systems.kfac.averages import renewed
from thinwire.systems.optim.advance import Advance, advance, step
from thinwire.systems.optim.moments import Adam, moments, shrinkage
from thinwire.systems.optim.norms import Rule, ratios

exact, gaussian, mstopk, threshold = (
    import_module(f"thinwire.core.kernels.select.{name}") for name in ("exact", "gaussian", "mstopk", "threshold")
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def selection(device):
    """Sets of indices are equal, but for "exact" and "threshold" among equals."""
    u = 0.7312345678901234
    for d, k, *kinds in ((7, 6, "drawn"), (1025, 103, "drawn", "zeros", "few", "bad"), (33_001, 300, "drawn", "seen")):
        for kind in kinds:
            x = torch.randn(d, generator=seeded(d))
            if kind == "bad":
                x[::7], x[::21] = torch.inf, torch.nan
            elif kind == "seen":  # only the sample's entries are large: the bound is too high
                x[torch.arange(d) % 9 > 0] = 0
            x = (0 * x if kind == "zeros" else x.round() if kind == "few" else x).to(device)
            ways = (
                (exact.choose,),
                (threshold.choose, 0.1, 0.5, u, 0.01, 10),
                (mstopk.choose, u, 30, "auto", "circular"),
                (mstopk.choose, u, 3, "min", "line"),
                (gaussian.choose, u, 3, "circular"),
            )
            for method, *options in ways[:1] if kind == "seen" and device == "cpu" else ways:  # slow there
                want, got = method.twin(x, k, *options), method.launch(x, k, *options)
                assert got.unique().numel() == k, (d, kind, options)
                assert (got.diff() > 0).all(), (d, kind, options)
                if kind == "bad":
                    assert not x[got].isfinite().any(), (d, kind, options)
                elif len(options) in (0, 5):
                    assert torch.equal(x[got].abs().sort().values, x[want].abs().sort().values), (d, kind, options)
                else:
                    assert torch.equal(got, want.sort().values), (d, kind, options)


def pair_messages(device):
    """Of pairs; the interpreter does not round to bf16 as a GPU does."""
    cases = ((9, 1, 1, torch.float32), (9001, 300, 5, torch.float32), (4099, 301, 2, torch.float16))
    for d, k, ranks, wire in (*cases, (500, 500, 3, torch.float16), (500, 33, 3, torch.bfloat16)):
        for bad in (None, ranks - 1):
            draw, sent = seeded(d), []
            for rank in range(ranks):
                a = torch.randn(d, generator=draw) * 10000
                a = (a.bfloat16().float() if wire == torch.bfloat16 else a * 10).to(device)
                indices = torch.randperm(d, generator=draw)[:k].sort().values.to(device)
                a[indices[0]] = torch.inf if rank == bad else 1.0
                finite, left = torch.tensor(rank != bad, device=device), a.clone()
                sent.append(pairs.send.twin(a, indices, finite, wire))
                assert torch.equal(pairs.send.launch(left, indices, finite, wire), sent[-1]) or rank == bad
                assert torch.equal(left.nan_to_num(7), a.nan_to_num(7)), (d, wire)
            want, got = torch.empty(d, device=device), torch.empty(d, device=device)
            for scale in (None, torch.tensor(8.7, device=device)):
                options = torch.stack(sent), k, wire, 7, scale
                verdicts = pairs.average.twin(want, *options), pairs.average.launch(got, *options)
                assert [bool(x) for x in verdicts] == [bad is None] * 2, (d, wire, bad)
                assert torch.equal(got, want) if bad is None else got.isnan().all(), (d, wire)


def merges(device):
    for d, k in ((1, 1), (40, 12), (3000, 1100)):
        draw, lists = seeded(d), []
        for _ in range(2):
            values = (2 * torch.randn(k, generator=draw)).round().to(device)
            lists += [values, torch.randperm(d, generator=draw)[:k].sort().values.to(device)]
        want, got = pairs.union.twin(*lists), pairs.union.launch(*lists)
        for x, y in zip(got, want):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), (d, k)
        for values in (want[0], torch.full_like(want[0], torch.nan)):
            kept = pairs.largest.twin(values, want[1], k)
            assert torch.equal(pairs.largest.launch(values, want[1], k), kept), (d, k)


# --- quantisers

CPU = torch.device("cpu")
THREE = torch.tensor(3.0)


def normal(n, seed=0):
    return torch.randn(n, generator=seeded(seed))


def _put(x, place):
    if isinstance(x, tuple):
        return tuple(_put(one, place) for one in x)
    return x.to(place, copy=True) if isinstance(x, torch.Tensor) else x


def both(function, device, *given, edits=(), **named):
    """What the twin makes of ``given`` on a CPU, and the kernels on ``device``; then what both leave there."""
    made = []
    for call, place in ((function.twin, CPU), (function.launch, device)):
        own = [_put(x, place) for x in given]
        more = {key: _put(x, place) for key, x in named.items()}
        out = call(*own, **more)
        outs = out if isinstance(out, tuple) else () if out is None else (out,)
        made.append([x.cpu() for x in (*outs, *(own[i] for i in edits))])
    return zip(*made, strict=True)


def same(function, device, *given, edits=(), **named):
    for want, got in both(function, device, *given, edits=edits, **named):
        assert torch.equal(want, got), (function.twin, (want != got).sum(), want.numel())


def blocks(device):
    for bits in (2, 4, 8):
        for n, block in ((1000, 64), (531, 16), (5, 8), (4096, 256), (5000, 1000), (300, 24), (5000, 4096)):
            a, draw = normal(n), noise(n, "blocks", device=CPU)
            a[:block] = 0
            same(encode, device, a, bits, block, leave_error=True, edits=[0])
            same(encode, device, a, bits, block, noise=draw)
            (codes, again), (scales, lengths) = both(encode, device, a, bits, block, "l2", draw)
            torch.testing.assert_close(scales, lengths)
            assert (codes != again).sum() <= 1 + n // 1000  # sums in another order
            parts = [encode.twin(normal(n, i), bits, block) for i in range(5)]
            rows = [torch.stack(part) for part in zip(*parts)]
            same(decode_sum, device, torch.empty(n), *rows, bits, block)
            same(decode_sum, device, torch.empty(n), *rows, bits, block, THREE)
        a = normal(200)
        a[30], a[90], a[150] = torch.nan, torch.inf, -torch.inf
        _, (want, got), (left, kept) = both(encode, device, a, bits, 16, leave_error=True, edits=[0])
        finite = [i not in (30 // 16, 90 // 16, 150 // 16) for i in range(13)]
        assert want.isfinite().tolist() == got.isfinite().tolist() == finite
        assert torch.equal(left.isfinite(), kept.isfinite())


def messages(device):
    """Codes and scales where messages have them, of several chunks."""
    for bits in (2, 4, 8):
        for block, count in ((16, 3), (24, 70), (256, 20)):
            chunks, size = 3, block * count
            made = []
            for place in (CPU, device):
                encodes, decodes = ((one.twin if place is CPU else one.launch) for one in (encode, decode_sum))
                a = normal(chunks * size).to(place)
                whole = torch.zeros(chunks, 16 + size * bits // 8, dtype=torch.uint8, device=place)
                tops = torch.zeros(chunks, count + 3, device=place)
                codes, scales = whole[:, 16:], tops[:, :count]
                encodes(a, bits, block, leave_error=True, out=(codes, scales))
                decoded = decodes(torch.empty(chunks * size, device=place), codes[None], scales[None], bits, block)
                total = decodes(torch.empty(size, device=place), codes, scales, bits, block)
                made.append([x.cpu() for x in (a, whole, tops, decoded, total)])
            for want, got in zip(*made):
                assert torch.equal(want, got), (bits, block, (want != got).sum(), want.numel())


def bins(device):
    for bits in (1, 2):
        for count, block, parts in ((9, 16, 1), (70, 24, 2), (20, 256, 3), (300, 64, 2)):
            a = normal(count * block * parts)
            a[:block] = 0
            (want, got), *others = both(encode_bins, device, a, bits, block, parts)
            assert (want != got).sum() <= 1 + len(a) // 1000  # an element beside a bound: sums in another order
            for one, other in others if torch.equal(want, got) else others[:1]:
                torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)
            rows = [encode_bins.twin(normal(len(a), i), bits, block, parts) for i in (1, 2)]
            codes, scales, values = (torch.stack(x) for x in zip(*rows))
            for options in ({}, {"divisor": THREE}, {"take": True}):
                same(decode_sum, device, a, codes, scales, bits, block, values=values, **options, edits=[0])
        a = normal(256)
        a[70] = torch.nan
        _, (_, scales), (_, found) = both(encode_bins, device, a, bits, 64)
        assert scales.isfinite().tolist() == [[True, False, True, True]]
        assert not found.isfinite().any()


def signs(device):
    for n in (1, 8, 1000, 5001):
        x = normal(n)
        x[::5] = 0
        same(pack_signs, device, x)
        owner = torch.arange(-(-n // 8), dtype=torch.int32) // 7
        values = torch.rand(4, int(owner[-1]) + 1, 2, generator=seeded(n))
        bits = torch.stack([pack_signs.twin(normal(n, i)) for i in range(4)])
        for options in ({}, {"divisor": THREE}, {"take": True}):
            same(decode_sum, device, x, bits, None, 1, 8, values=values, owner=owner, **options, edits=[0])


def sides(device):
    rows = Rows([Slot(str(n), (n,), None, torch.float32, CPU) for n in (5, 300_000, 2048, 1, 4097)], 8)
    a = normal(rows.count * 8)
    for want, got in both(means_of_sides, device, a, rows.cut(a), rows.sizes, rows.tiles(TILE)):
        torch.testing.assert_close(want, got)


def finite(device):
    """What torch's norms say of NaN and infinity, on which verdicts on a GPU rest."""
    for n in (7, 5000, 300_000):
        x = normal(n).to(device)
        assert all_finite(x)
        assert every_finite([x, x[:3]])
        torch.testing.assert_close(magnitudes([x, x[:3]], None), torch.stack([x.abs().max(), x[:3].abs().max()]))
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[n // 2] = bad
            assert not all_finite(x)
            assert not every_finite([x[:3], x])
            assert magnitudes([x[:3], x], None).isfinite().tolist() == [True, False]


def ternaries(device):
    for rows, width in ((1, 10), (9, 512)):
        a, draw = normal(rows * width), noise(rows * width, "ternary", device=CPU)
        limits = torch.linspace(0, 2, rows)
        for want, got in both(encode, device, a, 2, width, noise=draw, shared=(limits, limits * 2)):
            assert torch.equal(want, got)
        codes = torch.randint(-9, 9, (1, rows * width), dtype=torch.int8, generator=seeded(1))
        same(decode_sum, device, torch.empty(rows * width), codes, limits[None], 8, width, THREE)


def conditioned(n, r, condition):
    u, v = (torch.linalg.qr(torch.randn(size, r, generator=seeded(size), dtype=torch.float64)).Q for size in (n, r))
    scales = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), r, dtype=torch.float64)
    return ((u * scales) @ v).float()


def loss(q):
    q = q.double()
    return (q.mT @ q - torch.eye(q.shape[-1], device=q.device)).abs().max().item()


def bases(device):
    """Those of QR but for signs; orthonormal whatever the condition, and whatever is zero, equal or not finite."""
    shapes = [(3, 40, 4), (1100, 2), (5, 5), (64, 3), (4, 9, 2)]
    flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), generator=seeded(0)).to(device)
    for got, want in zip(orthogonalise_all.launch(flat, shapes), orthogonalise_all.twin(flat, shapes)):
        signs = (got * want).sum(-2, keepdim=True).sign()
        assert (got * signs - want).abs().max() <= 1e-5, got.shape
    for condition in (1e2, 1e4, 1e6, 1e7, 1e9):
        x = conditioned(200, 8, condition).to(device)
        (q,) = orthogonalise_all.launch(x.view(-1), [x.shape])
        assert loss(q) <= 1e-7, condition
        assert (x - q @ (q.mT @ x)).norm() <= 1e-6 * x.norm(), condition
    x = torch.randn(30, 4, generator=seeded(1)).to(device)
    x[:, 1], x[:, 2] = 0, 3 * x[:, 0]
    for broken in (x, torch.zeros_like(x), x[:4] * torch.inf, torch.full_like(x, torch.nan), x * 1e-30, x * 1e30):
        (q,) = orthogonalise_all.launch(broken.reshape(-1), [broken.shape])
        assert loss(q) <= 1e-7


def choices(device):
    for flag in (True, False):
        new, old = ([torch.randn(n, generator=seeded(n + k)).to(device) for n in (1, 70_000, 0, 37)] for k in (0, 1))
        want = [(x if flag else y).clone() for x, y in zip(new, old)]
        choose.launch(torch.tensor(flag, device=device), new, old)
        assert all(map(torch.equal, new, want)), flag


def layers(device, seed):
    """Of several sizes and strides, one of zeros, one without elements."""
    shapes = [(3,), (70_000,), (0, 4), (8, 4, 3, 3), (5, 5)]
    made = [torch.randn(shape, generator=seeded(seed + i)).to(device) for i, shape in enumerate(shapes)]
    made[3] = made[3].to(memory_format=torch.channels_last)
    if seed == 0:
        made[4].zero_()
    return made


def close(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def layer_ratios(device):
    for rule in (Rule(0.001, 0.01, 1e-8), Rule(), Rule(clamp=(0.5, 0.9))):
        for weights, others in ((layers(device, 0), layers(device, 10)), (layers(device, 20), layers(device, 0))):
            close(ratios.launch(weights, others, rule, None), ratios.twin(weights, others, rule, None))
    (nan,) = ratios.launch([torch.full((3,), torch.nan, device=device)], [torch.ones(3, device=device)], rule, None)
    assert nan.isnan()


def last_passes(device):
    shares = torch.rand(5, generator=seeded(7)).to(device)
    for momentum, nesterov in ((0.9, False), (0.9, True), (0.0, False)):
        for ratio, decay in ((shares, 0.1), (shares, 0.0), (None, 0.0)):
            made = []
            for way in (advance.launch, advance.twin):
                weights, buffers = layers(device, 0), layers(device, 20) if momentum else []
                way(weights, layers(device, 10), buffers, ratio, Advance(0.3, -1.0, decay, momentum, nesterov, 0.7))
                made.append(weights + buffers)
            close(*made)
    for ratio in (shares, None):
        made = [layers(device, 0), layers(device, 0)]
        for weights, way in zip(made, (step.launch, step.twin)):
            way(weights, layers(device, 10), ratio, 0.3)
        close(*made)


def adam(device):
    for limit in (1.0, 1e6):
        shrink = shrinkage.twin(layers(device, 10), limit)
        close([shrinkage.launch(layers(device, 10), limit)], [shrink])
        for divisor, sign, decay in ((shrink, 1.0, 0.1), (None, -1.0, 0.0)):
            made = []
            for way in (moments.launch, moments.twin):
                w, g, m = (layers(device, seed) for seed in (0, 10, 20))
                v = [x.square() for x in layers(device, 30)]
                updates, squares = way(w, g, m, v, divisor, sign, decay, Adam(0.9, 0.99, 1e-6, 3))
                rule = Rule()
                made.append([*w, *m, *v, *updates, ratios.launch(w, updates, rule, squares)])
            close(*made)


def triangles(device):
    for shape in ((1, 1), (5, 5), (700, 700), (3, 5, 5)):
        d = shape[-1]
        x = torch.randn(shape, generator=seeded(d)).to(device)
        for matrix, factor, end in ((x, 1.0, None), (x.mT, 0.3, 2.0)):
            packed = packed_times.launch(matrix, factor, end)
            assert torch.equal(packed, packed_times.twin(matrix, factor, end))
            triangle = packed if end is None else packed[..., :-1]
            assert torch.equal(unpacked.launch(triangle, d), unpacked.twin(triangle, d))


def averages(device):
    sums, olds = ([torch.randn(n, generator=seeded(n + k)).to(device) for n in (3, 70_000, 7, 20_000)] for k in (0, 1))
    sums[1][-1], sums[2][3] = torch.nan, torch.inf
    counts, updates = torch.tensor([2.0, 1.0, 3.0, 0.0], device=device), torch.arange(4.0, device=device)
    (got, after), (want, counted) = (
        way(sums, counts, olds, updates, updates / 5) for way in (renewed.launch, renewed.twin)
    )
    close(got, want)
    assert torch.equal(after, counted)
    assert counted.tolist() == [1, 1, 2, 3]


ALL = [
    selection,
    pair_messages,
    merges,
    blocks,
    messages,
    bins,
    signs,
    sides,
    finite,
    ternaries,
    bases,
    choices,
    layer_ratios,
    last_passes,
    adam,
    triangles,
    averages,
]

if __name__ == "__main__":
    for compare in ALL:
        compare("cpu")
    print("equal")
