import pytest
import torch

from rounding import of_sums
from thinwire.core.kernels.lowrank import basis_hash, fingerprint
from thinwire.core.kernels.orthogonal import orthogonalise, orthogonalise_all


def matrix(n, r, condition, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(n, r, generator=draw, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(r, r, generator=draw, dtype=torch.float64)).Q
    scales = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), r, dtype=torch.float64)
    return ((u * scales) @ v).to(dtype)


def loss(q):
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max().item()


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_columns_are_orthonormal_and_span_the_input(condition):
    x = matrix(1024, 32, condition)
    q = orthogonalise(x)
    assert loss(q) <= 2e-6
    assert torch.linalg.norm(x - q @ (q.mT @ x)) <= 1e-5 * torch.linalg.norm(x)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_degenerate_input_gives_a_finite_basis(value):
    q = orthogonalise(torch.full((20, 4), value))
    assert loss(q) <= 2e-6


def test_batched_equals_single_bit_for_bit():
    xs = [matrix(64, 4, 10.0, seed=s) for s in range(3)] + [matrix(48, 4, 10.0), torch.zeros(9, 0)]
    flat, shapes = torch.cat([x.reshape(-1) for x in xs]), [x.shape for x in xs]
    for q, x in zip(orthogonalise_all(flat, shapes), xs):
        assert torch.equal(q, orthogonalise(x))


def test_scale_does_not_matter():
    x = matrix(200, 4, 100.0)
    assert torch.equal(orthogonalise(x), orthogonalise(4 * x))
    rounding = of_sums(200**0.5, 100.0, torch.float32)  # of sums over the rows, as they go astray, times the condition
    assert (orthogonalise(x) - orthogonalise(3 * x)).abs().max() < rounding


def test_shapes_and_dtypes():
    assert orthogonalise(torch.zeros(5, 0)).shape == (5, 0)
    assert orthogonalise(torch.empty(7, 3, device="meta")).shape == (7, 3)
    with pytest.raises(ValueError, match="3 columns of 2 rows"):
        orthogonalise(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="fp32 or fp64"):
        orthogonalise(torch.zeros(4, 2, dtype=torch.bfloat16))


def test_hash_sees_one_bit():
    x = matrix(50, 4, 10.0)
    y = x.clone()
    y.view(torch.int32)[17, 2] ^= 1
    assert basis_hash(x) == basis_hash(x.clone()) != basis_hash(y)
    assert -(2**63) <= basis_hash(x) < 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprint_sees_one_bit_and_a_swap(dtype):
    x = matrix(50, 4, 10.0).to(dtype)
    words = torch.int32 if dtype == torch.float32 else torch.int64
    seen = {int(fingerprint(x))}
    for bit in range(words.itemsize * 8 - 1):
        y = x.clone()
        y.view(words)[17, 2] ^= 1 << bit
        seen.add(int(fingerprint(y)))
    assert len(seen) == words.itemsize * 8
    assert int(fingerprint(x.T.contiguous().T)) == int(fingerprint(x)) != int(fingerprint(x.flip(0)))
    assert fingerprint(x).dtype == torch.int64
