import numpy as np
import pytest
import torch

from thinwire.core.kernels.lowrank import peel_left, peel_right, project_left, rebuild
from thinwire.core.kernels.pairs import add_pairs, message_bytes, pack, to_wire, unpack
from thinwire.core.kernels.quantise import add_values, pack_bits, pack_signs
from thinwire.core.kernels.seeding import generator, normal, seed_of


@pytest.mark.parametrize("n", [*range(71), 65536, 65537, 200_001])
def test_bits_equal_numpy(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    bits = pack_signs(x)
    assert bits.dtype == torch.uint8
    assert np.array_equal(bits.numpy(), np.packbits((x >= 0).numpy(), bitorder="little"))
    one, signs = torch.ones(1), torch.zeros(n)
    add_values(signs, bits[None], one, -one)
    assert torch.equal(signs, torch.where(x >= 0, 1.0, -1.0))


def test_bits_of_a_strided_or_shifted_mask():
    mask = torch.rand(64, generator=torch.Generator().manual_seed(0)) > 0.5
    for view in (mask[::2], mask[3:19], mask[8:24]):
        assert np.array_equal(pack_bits(view).numpy(), np.packbits(view.numpy(), bitorder="little"))


def test_add_values_adds_every_row():
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bits = torch.stack([pack_signs(row) for row in x])
    high, low = (
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([-4.0, -5.0, -6.0], dtype=torch.float64),
    )
    out = torch.zeros(100, dtype=torch.float64)
    add_values(out, bits, high, low)
    assert torch.equal(out, torch.where(x >= 0, high[:, None], low[:, None]).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 3])
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


def test_fp16_wire_saturates_but_keeps_what_is_not_finite():
    sent = to_wire(torch.tensor([1e6, -1e6, torch.inf, torch.nan, 2.0]), torch.float16)
    assert sent[:2].tolist() == [65504.0, -65504.0]
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
    torch.testing.assert_close(project_left(a, q), a @ q)
    torch.testing.assert_close(peel_left(left, q), a @ q)
    torch.testing.assert_close(left, a - a @ q @ q.mT)
    torch.testing.assert_close(peel_right(right, p), a.mT @ p)
    torch.testing.assert_close(right, a - p @ p.mT @ a)
    out = torch.empty_like(a)
    rebuild(p, q, out)
    torch.testing.assert_close(out, p @ q.mT)
