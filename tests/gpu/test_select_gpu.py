"""Selection on CUDA: the same entries as on the CPU, no host read, Triton kernels equal to their twins."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from thinwire.core.kernels.select import ALGORITHMS, top_k

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def no_host_read():
    def start():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield start
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("d,k", [(1025, 10), (10**6 + 3, 1000), (10**6 + 3, 300_000)])
def test_as_on_the_cpu(algorithm, d, k, no_host_read):
    x = torch.randn(d, generator=seeded(d))
    want = top_k(x, k, algorithm, seeded())[0].abs().sort().values
    there = x.cuda()
    top_k(there, k, algorithm, seeded())
    no_host_read()
    values, indices = top_k(there, k, algorithm, seeded())
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(values, there[indices])
    assert indices.numel() == k
    assert (indices.diff() > 0).all()
    got = values.abs().sort().values.cpu()
    if algorithm in ("exact", "threshold"):
        assert torch.equal(got, want)
    else:  # the mean is summed in another order
        assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_dtypes(algorithm, dtype):
    x = torch.randn(200_001, generator=seeded()).to(dtype)
    want, got = top_k(x, 2000, algorithm, seeded())[0], top_k(x.cuda(), 2000, algorithm, seeded())[0].cpu()
    assert (got.abs().sort().values != want.abs().sort().values).float().mean() < 0.01


@needs_triton
def test_triton_kernels_equal_their_twins():
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_cases

    for compare in triton_cases.ALL:
        compare("cuda")
