import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.kernels.lowrank import peel_left, peel_right, project_left, rebuild
from thinwire.core.kernels.pairs import (
    add_pairs,
    by_index,
    contains,
    largest,
    merge_pairs,
    message_bytes,
    pack,
    to_wire,
    unpack,
)
from thinwire.core.kernels.quantise.bins import pack_signs
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.seeding import generator, normal, seed_of


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 64, 65, 65536, 65537, 300_001])
def test_bits_equal_numpy(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    bits = pack_signs(x)
    assert bits.dtype == torch.uint8
    assert np.array_equal(bits.numpy(), np.packbits((x >= 0).numpy(), bitorder="little"))
    given = {"values": torch.tensor([[[-1.0, 1.0]]]), "owner": torch.zeros(len(bits), dtype=torch.int32)}
    signs = decode_sum(torch.empty(n), bits[None], None, 1, 8, **given)
    assert torch.equal(signs, torch.where(x >= 0, 1.0, -1.0))
    assert torch.equal(decode_sum(x.clone(), bits[None], None, 1, 8, **given, take=True), x - signs)


def test_zeros_of_both_signs_are_positive():
    assert pack_signs(torch.tensor([0.0, -0.0, 1.0, -1.0] * 4)).tolist() == [0b01110111] * 2


def test_signs_of_every_row_are_added():
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bits = torch.stack([pack_signs(row) for row in x])
    sides = torch.tensor([[[-4.0, 1.0], [-7.0, 7.0]], [[-5.0, 2.0], [0.0, 9.0]], [[-6.0, 3.0], [-8.0, 0.5]]]).double()
    owner, out = (torch.arange(13) >= 5).int(), torch.empty(100, dtype=torch.float64)
    below, above = sides[:, owner.repeat_interleave(8)[:100].long()].unbind(-1)
    want = torch.where(x >= 0, above, below).sum(0)
    assert torch.equal(decode_sum(out, bits, None, 1, 8, values=sides, owner=owner), want)
    assert torch.equal(decode_sum(out, bits, None, 1, 8, torch.tensor(4.0), values=sides, owner=owner), want / 4)


@pytest.mark.parametrize(
    ("dtype", "k", "ranks"),
    [
        (torch.float32, 5, 3),
        (torch.float64, 2, 1),
        (torch.bfloat16, 1, 3),
        (torch.bfloat16, 8, 1),
        (torch.float16, 5, 3),
    ],
)
def test_pairs_survive_the_wire(dtype, k, ranks):
    values = torch.randn(ranks, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    indices = torch.stack([torch.randperm(100)[:k] for _ in range(ranks)])
    message = torch.stack([pack(v, i) for v, i in zip(values, indices)])
    assert message.dtype == torch.uint8
    assert message.shape == (ranks, message_bytes(k, dtype))
    got_values, got_indices = unpack(message, k, dtype)
    assert torch.equal(got_values, values)
    assert torch.equal(got_indices, indices)
    out = add_pairs(torch.zeros(100, dtype=torch.float64), got_values, got_indices)
    want = torch.zeros(100, dtype=torch.float64)
    for v, i in zip(values, indices):
        want[i] += v.double()
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_saturate_but_keep_what_is_not_finite(dtype):
    largest = torch.finfo(torch.float32).max
    sent = to_wire(torch.tensor([largest, -largest, torch.inf, torch.nan, 2.0]), dtype)
    assert sent[:2].tolist() == [torch.finfo(dtype).max, torch.finfo(dtype).min]
    assert sent[2].isinf()
    assert sent[3].isnan()


def test_seeds_depend_on_words_alone():
    assert seed_of(0, "a") == seed_of("0:a") != seed_of(1, "a")
    assert torch.equal(torch.rand(3, generator=generator(0, "a")), torch.rand(3, generator=generator(0, "a")))
    cpu = torch.device("cpu")
    wide = normal(4, 2, 0, "a", dtype=torch.float64, device=cpu)
    assert torch.equal(wide.float(), normal(4, 2, 0, "a", dtype=torch.float32, device=cpu))
    assert normal(4, 2, 0, dtype=torch.float32, device=torch.device("meta")).shape == (4, 2)


@pytest.mark.parametrize("n,m", [(9, 7), (1500, 1200), (1, 5)])
def test_blocked_products_equal_the_plain_ones(n, m):
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(n, m, generator=draw, dtype=torch.float64)
    q, p = (
        torch.randn(m, 3, generator=draw, dtype=torch.float64),
        torch.randn(n, 3, generator=draw, dtype=torch.float64),
    )
    left, right = a.clone(), a.clone()
    made_p, made_q, made_a = (torch.empty_like(x)[None] for x in (p, q, a))
    project_left(a[None], q[None], made_p)
    torch.testing.assert_close(made_p[0], a @ q)
    peel_left(left[None], q[None], made_p)
    torch.testing.assert_close(made_p[0], a @ q)
    torch.testing.assert_close(left, a - a @ q @ q.mT)
    peel_right(right[None], p[None], made_q)
    torch.testing.assert_close(made_q[0], a.mT @ p)
    torch.testing.assert_close(right, a - p @ p.mT @ a)
    rebuild(p[None], q[None], made_a)
    torch.testing.assert_close(made_a[0], p @ q.mT)


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
    bad = torch.full((3,), torch.nan), torch.tensor([1, 5, 9])
    good = torch.tensor([1e30, -1e30, 1.0]), torch.tensor([0, 5, 8])
    for mine, other in ((bad, good), (good, bad)):
        values, indices, _ = merge_pairs(mine, other)
        assert values.isnan().all()
        assert indices.tolist() == [1, 5, 9]


def test_rows_of_pairs_are_packed_at_once():
    values, indices = torch.randn(4, 3).bfloat16(), torch.randint(-1, 99, (4, 3))
    message = pack(values, indices)
    assert torch.equal(message, torch.stack([pack(v, i) for v, i in zip(values, indices)]))
    got = unpack(message, 3, torch.bfloat16)
    assert torch.equal(got[0], values)
    assert torch.equal(got[1], indices)
    ordered = torch.tensor([-1, -1, 2, 7, 30])
    assert contains(ordered, torch.tensor([30, 0, 2, 31, 6])).tolist() == [True, False, True, False, False]


def test_pads_are_last():
    values, indices = torch.tensor([0.0, 5.0, 0.0, -7.0]), torch.tensor([-1, 4, -1, 2])
    kept = largest(values, indices, 3)
    assert indices[kept].tolist() == [-1, 4, 2]
    assert values[kept].tolist() == [0.0, 5.0, -7.0]
