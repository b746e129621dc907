import pytest
import torch
from selections import contract, vectors

from thinwire.core.kernels.select import keep_count, top_k


def check(x, k):
    values, indices = top_k(x, k)
    contract(x, k, values, indices)
    k = min(k, x.numel())
    got = values.float().abs().sort().values
    assert torch.equal(got, x.float().abs().sort().values[x.numel() - k :])


@pytest.mark.parametrize("d", [1, 7, 1023, 1025, 100_003])
def test_contract(d):
    for _, x in vectors(d):
        for k in sorted({1, 2, d // 100, d - 1, d, d + 5} - {0, -1}):
            check(x, k)


def test_contract_at_a_million():
    d = 10**6 + 3
    for name, x in vectors(d):
        if name in ("normal", "zeros", "spike", "periodic"):
            for k in (1, 2, d // 1000, d // 20):
                check(x, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides(dtype):
    for d in (1025, 200_001):
        x = torch.randn(2 * d, generator=torch.Generator().manual_seed(1)).to(dtype)
        check(x[::2], 10)
        check(x, d // 50)


@pytest.mark.parametrize("d", [100, 100_000])
@pytest.mark.parametrize("count", [1, 3, 30_000])
def test_non_finite_entries_come_first(d, count):
    x = torch.randn(d, generator=torch.Generator().manual_seed(0))
    where = torch.randperm(d, generator=torch.Generator().manual_seed(1))[:count]
    x[where] = torch.nan
    x[where[: count // 2]] = -torch.inf
    values, indices = top_k(x, 10)
    assert indices.unique().numel() == 10
    assert (~values.isfinite()).sum() == min(10, where.numel())


def test_contraction_with_equality_for_equal_magnitudes():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for vector, tight in ((x, False), (x.sign(), True)):
        rest = vector.clone()
        rest[top_k(vector, 100)[1]] = 0
        bound = 0.9 * vector.square().sum()
        assert rest.square().sum() <= bound + 1e-12
        assert (rest.square().sum() >= bound - 1e-9) == tight


def test_refusals():
    x = torch.zeros(4)
    assert top_k(x, 0)[1].numel() == top_k(x[:0], 3)[1].numel() == 0
    for call, words in (
        (lambda: top_k(x, -1), "negative"),
        (lambda: top_k(x.view(2, 2), 1), "1-D"),
        (lambda: top_k(x, 1, "mstopk_"), "use one of 'exact'"),
        (lambda: top_k(x, 1, samplings=3), "no option 'samplings'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_keep_count():
    assert [keep_count(d, 0.01) for d in (0, 1, 99, 100, 250)] == [0, 1, 1, 1, 2]
    assert keep_count(1000, 0.1) == 100  # floor(0.1 * 1000) without the guard may be 99
    assert keep_count(7, 1.0) == 7
