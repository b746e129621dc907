"""Vectors and checks that the tests of selection share."""

import contextlib

import pytest
import torch

from thinwire.core.kernels.select import magnitudes

SEARCHES = ("mstopk", "gaussian", "threshold")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def laplace(d, seed=0):
    u = torch.rand(d, generator=seeded(seed), dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def vectors(d):
    draw = seeded(d)
    spike = torch.zeros(d)
    spike[d // 2] = -3.0
    yield "normal", torch.randn(d, generator=draw)
    yield "laplace", laplace(d)
    yield "half zeros", torch.randn(d, generator=draw) * (torch.rand(d, generator=draw) < 0.5)
    yield "zeros", torch.zeros(d)
    yield "equal", torch.full((d,), -2.0)
    yield "two-valued", torch.randint(0, 2, (d,), generator=draw).float()
    yield "spike", spike
    yield "sorted", torch.arange(d, dtype=torch.float32)
    yield "denormal", torch.randn(d, generator=draw) * 1e-41
    yield "signed zeros", torch.where(torch.rand(d, generator=draw) < 0.5, 0.0, -0.0)
    yield "periodic", torch.arange(d).remainder(64).float()
    yield "huge", torch.randn(d, generator=draw) * 1e37


def contract(x, k, values, indices):
    """min(k, d) distinct int64 indices; values are the vector's own bits."""
    k = min(k, x.numel())
    assert indices.dtype == torch.int64
    assert indices.shape == values.shape == (k,)
    assert indices.unique().numel() == k
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(values.view(bits), x[indices].view(bits))


def recall(x, indices):
    """Share of the true top-k among the chosen."""
    best = x.abs().topk(indices.numel()).values.amin()
    return float((x[indices].abs() >= best).float().mean())


@contextlib.contextmanager
def static_shapes():
    """Searches run as on a GPU: no host read, shapes that do not depend on values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magnitudes, "on_host", lambda x: False)
        yield
