"""Merges of sparse vectors against the same on dense ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.kernels.pairs import by_index, contains, largest, merge_pairs, pack, take, unpack


def drawn(d, k, seed, coarse):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(k, generator=g, dtype=torch.float64)
    return by_index((2 * values).round() if coarse else values, torch.randperm(d, generator=g)[:k])


@settings(max_examples=150, deadline=None)
@given(d=st.integers(1, 60), share=st.floats(0, 1), seed=st.integers(0, 10**6), coarse=st.booleans())
def test_a_merge_is_the_cut_sum(d, share, seed, coarse):
    k = max(1, int(share * d))
    a, b = drawn(d, k, seed, coarse), drawn(d, k, seed + 1, coarse)
    total = torch.zeros(d, dtype=torch.float64)
    for values, indices in (a, b):
        total[indices] += values
    union = torch.zeros(d, dtype=torch.bool)
    union[a[1]] = union[b[1]] = True
    order = sorted(union.nonzero().view(-1).tolist(), key=lambda i: (-abs(total[i].item()), i))
    values, indices, places = merge_pairs(a, b)
    assert indices.tolist() == sorted(order[:k])
    assert torch.equal(values, total[indices])
    assert [a[1][p].item() if p >= 0 else None for p in places.tolist()] == [
        i if i in a[1].tolist() else None for i in indices.tolist()
    ]
    other = merge_pairs(b, a)
    assert torch.equal(other[0].view(torch.int64), values.view(torch.int64))  # to the bit
    assert torch.equal(other[1], indices)


def test_what_is_not_finite_survives_a_merge():
    k = 3
    bad = torch.full((k,), torch.nan), torch.tensor([1, 5, 9])
    good = torch.tensor([1e30, -1e30, 1.0]), torch.tensor([0, 5, 8])
    for mine, other in ((bad, good), (good, bad)):
        values, indices, _ = merge_pairs(mine, other)
        assert values.isnan().all()
        assert indices.tolist() == [1, 5, 9]


def test_pads_are_last():
    values, indices = torch.tensor([0.0, 5.0, 0.0, -7.0]), torch.tensor([-1, 4, -1, 2])
    kept = largest(values, indices, 3)
    assert take(indices, kept, 3).tolist() == [-1, 4, 2]
    assert take(values, kept, 3).tolist() == [0.0, 5.0, -7.0]


def test_contains():
    indices = torch.tensor([-1, -1, 2, 7, 30])
    assert contains(indices, torch.tensor([30, 0, 2, 31, 6])).tolist() == [True, False, True, False, False]


def test_rows_of_pairs_are_packed_at_once():
    g = torch.Generator().manual_seed(0)
    values, indices = torch.randn(4, 3, generator=g).bfloat16(), torch.randint(-1, 99, (4, 3), generator=g)
    message = pack(values, indices)
    assert torch.equal(message, torch.stack([pack(v, i) for v, i in zip(values, indices)]))
    got = unpack(message, 3, torch.bfloat16)
    assert torch.equal(got[0], values)
    assert torch.equal(got[1], indices)
