"""Packing, the ladder of inverses, and what they do to a gradient, against dense solves."""

import pytest
import torch
from layers_by_hand import dense_solve

from thinwire.core.kernels.symmetric import (
    FAILED,
    ON_CPU,
    damped_eigen,
    damped_inverse,
    first_eigen,
    first_inverse,
    mean_diagonal,
    pack_upper,
    packed_size,
    packed_times,
    pi_ratio,
    precondition_eigen,
    side_of,
    unpack_upper,
)


def positive(d, seed=0, dtype=torch.float64):
    x = torch.randn(2 * d, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return x.mT @ x / (2 * d)


@pytest.mark.parametrize("d", [1, 2, 31, 2049])
def test_packing_is_the_identity_bit_for_bit(d):
    matrix = torch.randn(d, d, generator=torch.Generator().manual_seed(d))
    matrix = matrix.triu() + matrix.triu(1).mT
    packed = pack_upper(matrix)
    assert packed.numel() == packed_size(d) == d * (d + 1) // 2
    assert side_of(packed.numel()) == d
    assert torch.equal(unpack_upper(packed, d), matrix)
    assert torch.equal(packed, matrix[tuple(torch.triu_indices(d, d))])


def test_what_cannot_be_packed_is_refused():
    matrix = positive(5)
    packed = pack_upper(matrix)
    matrix[3, 1] += 0.1
    assert torch.equal(pack_upper(matrix), packed)  # the lower triangle is not looked at
    with pytest.raises(ValueError, match="square"):
        pack_upper(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="5 elements"):
        unpack_upper(torch.zeros(5))
    with pytest.raises(ValueError, match="not of 4 x 4"):
        unpack_upper(torch.zeros(6), 4)


def test_a_batch_is_its_matrices():
    each = [positive(7, seed) for seed in range(3)]
    batch = torch.stack(each)
    packed = packed_times(batch, 0.5, 2.0)
    assert torch.equal(packed, torch.stack([packed_times(x, 0.5, 2.0) for x in each]))
    assert torch.equal(unpack_upper(packed[:, :-1]), torch.stack([unpack_upper(x[:-1]) for x in packed]))
    batch[1, 2, 2] = torch.nan
    inverses, good = first_inverse(batch, torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64))
    assert good.tolist() == [True, False, True]
    for place, damping in ((0, 0.1), (2, 0.3)):
        torch.testing.assert_close(inverses[place], damped_inverse(each[place], damping)[0], rtol=1e-12, atol=1e-12)
    (vectors, values), good = first_eigen(batch)
    assert good.tolist() == [True, False, True]
    for place in (0, 2):
        assert torch.equal(vectors[place], damped_eigen(each[place])[0])
        assert torch.equal(values[place], damped_eigen(each[place])[1])


def test_in_single_precision():
    a, g = positive(12, dtype=torch.float32), positive(9, 1, dtype=torch.float32)
    gradient = torch.randn(9, 12, generator=torch.Generator().manual_seed(2))
    v = precondition_eigen(gradient, damped_eigen(a)[:2], damped_eigen(g)[:2], 1e-2)
    wanted = dense_solve(a.double(), g.double(), gradient.double(), 1e-2)
    torch.testing.assert_close(v.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_the_ladder():
    base = torch.eye(3, dtype=torch.float64)
    for level, smallest in ((0, 0.0), (1, -0.05), (2, -0.5), (3, -5.0)):
        a = base.clone()
        a[0, 0] = smallest
        inverse, reached = damped_inverse(a, 0.01)
        assert reached == level
        torch.testing.assert_close(inverse[0, 0], 1 / (a[0, 0] + 0.01 * 10**level))
    assert damped_inverse(base, 0.01, least=2)[1] == 2
    at_least = damped_inverse(base, 0.01, least=ON_CPU)
    assert at_least[1] == ON_CPU
    torch.testing.assert_close(at_least[0], base / 1.01)
    for bad in (-100 * base, base * torch.nan, base * torch.inf):
        inverse, level = damped_inverse(bad, 0.01)
        assert level == FAILED
        assert not inverse.any()
    assert damped_inverse(base, 0.01, least=FAILED)[1] == FAILED


def test_eigen_clamps_and_gives_up():
    vectors, values, level = damped_eigen(torch.diag(torch.tensor([2.0, -1.0, 0.5])))
    assert level == 0
    assert sorted(values.tolist()) == [0.0, 0.5, 2.0]
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(3))
    assert damped_eigen(torch.eye(3) * torch.nan)[2] == FAILED
    assert damped_eigen(torch.eye(3), least=1)[2] == ON_CPU


def test_pi_of_nothing_is_one():
    means = [mean_diagonal(x) for x in (torch.zeros(2, 2), torch.eye(3), 4 * torch.eye(3))]
    assert pi_ratio(means[0], means[1]) == 1
    assert pi_ratio(means[1], means[0]) == 1
    assert pi_ratio(means[2], means[1]) == 2
