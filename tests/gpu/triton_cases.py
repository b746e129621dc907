"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

import torch

from thinwire.core.kernels.orthogonal import in_rounds
from thinwire.core.kernels.select.histogram import count_digits
from thinwire.core.kernels.tables import choose


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
    return (q.mT @ q - torch.eye(q.shape[-1], device=q.device)).abs().max().item()


def bases(device):
    """Those of QR but for signs; orthonormal whatever the condition, and whatever is zero, equal or not finite."""
    shapes = [(3, 40, 4), (1100, 2), (5, 5), (64, 3), (4, 9, 2)]
    flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), generator=seeded(0)).to(device)
    for got, want in zip(in_rounds.launch(flat, shapes), in_rounds.twin(flat, shapes)):
        signs = (got * want).sum(-2, keepdim=True).sign()
        assert (got * signs - want).abs().max() <= 1e-5, got.shape
    for condition in (1e2, 1e4, 1e6, 1e7, 1e9):
        x = conditioned(200, 8, condition).to(device)
        (q,) = in_rounds.launch(x.view(-1), [x.shape])
        assert loss(q) <= 1e-6, condition
        assert (x - q @ (q.mT @ x)).norm() <= 1e-6 * x.norm(), condition
    x = torch.randn(30, 4, generator=seeded(1)).to(device)
    x[:, 1], x[:, 2] = 0, 3 * x[:, 0]
    for broken in (x, torch.zeros_like(x), x[:4] * torch.inf, torch.full_like(x, torch.nan), x * 1e-30, x * 1e30):
        (q,) = in_rounds.launch(broken.reshape(-1), [broken.shape])
        assert loss(q) <= 1e-6


def choices(device):
    for flag in (True, False):
        new, old = ([torch.randn(n, generator=seeded(n + k)).to(device) for n in (1, 20_000, 0, 37)] for k in (0, 1))
        want = [(x if flag else y).clone() for x, y in zip(new, old)]
        choose.launch(torch.tensor(flag, device=device), new, old)
        assert all(map(torch.equal, new, want)), flag


ALL = [histograms, bases, choices]

if __name__ == "__main__":
    for compare in ALL:
        compare("cpu")
    print("equal")
