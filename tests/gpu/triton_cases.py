"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

import torch

from thinwire.core.kernels.orthogonal import orthogonalise_all
from thinwire.core.kernels.select.histogram import count_digits
from thinwire.core.kernels.symmetric import packed_times, unpacked
from thinwire.core.kernels.tables import choose, copy_times
from thinwire.systems.kfac.averages import renewed
from thinwire.systems.optim.advance import Advance, advance, step
from thinwire.systems.optim.moments import Adam, moments, shrinkage
from thinwire.systems.optim.norms import Rule, ratios


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def histograms(device):
    for d in (1, 1000, 5001):
        keys = torch.randn(d, generator=seeded(d)).abs().view(torch.int32).to(device)
        shift, prefix = 31, torch.zeros((), dtype=torch.int64, device=device)
        for bits in (11, 10, 10):
            want = count_digits.twin(keys, prefix, shift, bits)
            got = count_digits.launch(keys, prefix, shift, bits)
            assert torch.equal(got, want), (d, shift)
            shift -= bits
            prefix = (prefix << bits) | want.argmax()


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
    made = [torch.full_like(x, 9.0) for x in old]
    copy_times.launch(made, old, 0.3)
    assert all(torch.equal(x, y * 0.3) for x, y in zip(made, old))


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
    for d in (1, 5, 700):
        x = torch.randn(d, d, generator=seeded(d)).to(device)
        for matrix, factor, end in ((x, 1.0, None), (x.mT, 0.3, 2.0)):
            packed = packed_times.launch(matrix, factor, end)
            assert torch.equal(packed, packed_times.twin(matrix, factor, end))
            triangle = packed if end is None else packed[:-1]
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


ALL = [histograms, bases, choices, layer_ratios, last_passes, adam, triangles, averages]

if __name__ == "__main__":
    for compare in ALL:
        compare("cpu")
    print("equal")
