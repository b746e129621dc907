"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

import torch

from thinwire.kernels.select.histogram import digits
from thinwire.kernels.select.reuse import reuse
from thinwire.kernels.triton import select as triton_select


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def histograms(device):
    for d in (1, 1000, 5001):
        keys = torch.randn(d, generator=seeded(d)).abs().view(torch.int32).to(device)
        shift, prefix = 31, torch.zeros((), dtype=torch.int64, device=device)
        for bits in (11, 10, 10):
            want = digits(keys, prefix, shift, bits)
            got = triton_select.digits(keys, prefix, shift, bits)
            assert torch.equal(got, want), (d, shift)
            shift -= bits
            prefix = (prefix << bits) | want.argmax()


def fused(device):
    for d in (1, 1000, 5001):
        for dtype in (torch.float32, torch.bfloat16):
            residual = torch.randn(d, generator=seeded(d)).to(device)
            gradient = torch.randn(d, generator=seeded(d + 1)).to(dtype).to(device)
            for level in (0.0, 1.0, 3.0, 100.0):
                threshold = torch.tensor(level, device=device)
                for capacity in sorted({1, max(1, d // 10), d}):
                    compare(residual, gradient, threshold, capacity)
    residual[7] = torch.nan
    compare(residual, gradient, torch.tensor(3.0, device=device), 10)


def compare(residual, gradient, threshold, capacity):
    a = residual + gradient
    values, indices, count = reuse(a, threshold, capacity, seeded(3))
    got, v, i, n = triton_select.accumulate_select(residual, gradient, threshold, capacity, seeded(3))
    torch.testing.assert_close(got, a, rtol=0, atol=0, equal_nan=True)
    assert int(n) == int(count)
    assert torch.equal(i.sort().values, indices.sort().values)
    torch.testing.assert_close(v[i.argsort()], values[indices.argsort()], rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    histograms("cpu")
    fused("cpu")
    print("equal")
