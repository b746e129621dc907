import numpy as np
import pytest
import torch

from thinwire.core.kernels.quantise.bins import encode_bins
from thinwire.core.kernels.quantise.codes import decode_sum, levels, pack_codes, packed_bytes, unpack_codes
from thinwire.core.kernels.quantise.linear import encode
from thinwire.core.kernels.seeding import noise
from thinwire.core.methods.terngrad import magnitudes

CPU = torch.device("cpu")


def magnitude(a, clip):
    return magnitudes([a], clip)[0]


def ternary(a, limit, top, draw):
    """-1, 0 or 1, of a tensor that is one block."""
    return encode(a, 2, len(a), noise=draw, shared=(limit, top))


def normal(n, seed=0, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(a, bits, block, norm, draw):
    """Codes and scales, block by block and element by element."""
    s, codes, scales = 2 ** (bits - 1) - 1, [], []
    for start in range(0, len(a), block):
        v = a[start : start + block]
        top = np.abs(v).max() if norm == "max" else np.sqrt((v * v).sum())
        scales.append(top / s)
        for i, x in enumerate(v):
            level = abs(x) / top * s if top else 0.0
            if draw is None:
                low = np.round(level)
            else:  # the noise as a probability; below zero the upper neighbour is the one of smaller magnitude
                u = (int(draw[start + i]) + 32768.5) / 65536
                low = np.floor(level) + (level % 1 > (u if x < 0 else 1 - u))
            codes.append(int(np.sign(x) * low) + s)
    return np.array(codes, dtype=np.uint8), np.array(scales)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_are_packed_low_bits_first(bits):
    for n in range(71):
        codes = torch.randint(0, 2**bits, (n + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))[3:]
        packed = pack_codes(codes, bits)
        want = np.packbits(
            np.unpackbits(codes.numpy()[:, None], axis=1, bitorder="little")[:, :bits], bitorder="little"
        )
        assert packed.dtype == torch.uint8
        assert np.array_equal(packed.numpy(), want)
        assert packed.numel() == packed_bytes(n, bits)
        if bits > 1:  # single bits are looked up
            assert torch.equal(unpack_codes(packed, n, bits), codes)
        if n > 2:
            assert torch.equal(pack_codes(codes[::2], bits), pack_codes(codes[::2].clone(), bits))


@pytest.mark.parametrize("rounding", ["random", "nearest"])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_equal_a_loop_over_the_elements(bits, norm, rounding):
    for n, block in ((1, 8), (64, 16), (531, 64)):
        a = normal(n, n)
        a[n // 3] = 0
        a[block : 2 * block] = 0  # a block of zeros
        draw = noise(n, "test", n, device=CPU) if rounding == "random" else None
        codes, scales = encode(a, bits, block, norm, draw)
        want_codes, want_scales = reference(a.numpy(), bits, block, norm, draw)
        assert np.array_equal(unpack_codes(codes, n, bits).numpy(), want_codes)
        np.testing.assert_allclose(scales.numpy(), want_scales, rtol=1e-14)


@pytest.mark.parametrize("bits,block", [(2, 8), (4, 512), (8, 24), (4, 80_000)])
def test_long_tensors_equal_their_blocks_one_by_one(bits, block):
    n = 200_003
    a, draw = normal(n, 1, torch.float32), noise(n, "long", device=CPU)
    codes, scales = encode(a, bits, block, "max", draw)
    out = decode_sum(torch.empty(n), codes[None], scales[None], bits, block)
    for i in (0, 1, scales.numel() // 2, scales.numel() - 1):
        here = slice(i * block, (i + 1) * block)
        part, scale = encode(a[here], bits, block, "max", draw[here])
        count = a[here].numel()
        assert torch.equal(unpack_codes(codes, n, bits)[here], unpack_codes(part, count, bits))
        assert scale == scales[i]
        assert torch.equal(out[here], (unpack_codes(part, count, bits).float() - levels(bits)) * scale)
    assert (out - a).abs().max() <= scales.max() * (1 + 1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_are_added_in_order(bits):
    n, block = 100, 16
    parts = [encode(normal(n, i), bits, block) for i in range(3)]
    codes, scales = (torch.stack([part[j] for part in parts]) for j in (0, 1))
    out, want = decode_sum(normal(n, 9), codes, scales, bits, block), torch.zeros(n, dtype=torch.float64)
    for row, scale in zip(codes, scales):
        want += (unpack_codes(row, n, bits).double() - levels(bits)) * scale.repeat_interleave(block)[:n]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("n", "block"), [(531, 64), (600_000, 24), (5, 8)])
def test_the_error_that_is_left_is_what_the_codes_do_not_stand_for(bits, n, block):
    a = normal(n, n)
    a[:block] = 0
    left = a.clone()
    codes, scales = encode(left, bits, block, leave_error=True)
    same, equal = encode(a, bits, block)
    assert torch.equal(codes, same)
    assert torch.equal(scales, equal)
    torch.testing.assert_close(left, a - decode_sum(torch.empty_like(a), codes[None], scales[None], bits, block))
    assert left.abs().max() <= 0.5 * scales.max() * (1 + 1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("tiny", [1e-45, 2e-43, 1e-38, 3e38])
def test_errors_of_extreme_magnitudes_stay_finite_and_small(bits, tiny):
    a = torch.tensor([tiny, -tiny, 0.0, tiny / 3])
    left = a.clone()
    encode(left, bits, 8, leave_error=True)
    assert left[2] == 0
    assert (left.abs() <= a.abs().max()).all()


def test_nearest_is_half_to_even():
    a = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert (unpack_codes(encode(a, 8, 8)[0], 6, 8).int() - 127).tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_bad_element_spoils_the_scale_of_its_block(bad, norm):
    a = normal(64)
    a[20] = bad
    _, scales = encode(a, 4, 16, norm, noise(64, "bad", device=CPU))
    assert scales.isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e38])
def test_extreme_magnitudes(tiny):
    a = torch.tensor([tiny, -tiny, 0.0, tiny])
    draw = noise(4, "tiny", device=CPU)
    codes, scales = encode(a, 2, 8, "max", draw)
    assert unpack_codes(codes, 4, 2).tolist() == [2, 0, 1, 2]
    assert scales.tolist() == [a[0]]
    assert ternary(a, a[:1], a[:1], draw)[0].tolist() == [1, -1, 0, 1]


def test_shapes_on_meta():
    a = torch.empty(100, device="meta")
    codes, scales = encode(a, 4, 16)
    assert (codes.shape, scales.shape, codes.dtype) == ((50,), (7,), torch.uint8)
    decode_sum(a, codes[None], scales[None], 4, 16)
    assert magnitude(a, 2.5).shape == ()
    codes, _ = ternary(a, scales[:1], scales[:1], noise(100, device=a.device))
    assert (codes.shape, codes.dtype) == ((100,), torch.int8)


def test_magnitude():
    a = normal(500)
    assert magnitude(a, None) == a.abs().max()
    assert magnitude(a, 1.5) == pytest.approx(1.5 * a.square().mean().sqrt().item(), rel=1e-12)
    assert magnitude(a, 100.0) == a.abs().max()
    assert magnitude(torch.zeros(3), 2.5) == 0
    assert magnitude(torch.full((7,), -3.0), 2.5) == 3  # a constant tensor is not clamped to nothing
    for extreme in (1e30, 1e-30):  # whose squares are infinite, or zero
        assert magnitude(torch.full((7,), extreme), 2.5) == torch.tensor(extreme)
    for bad in (torch.nan, torch.inf):
        assert not magnitude(torch.tensor([1.0, bad]), 2.5).isfinite()


def test_ternary_against_a_loop():
    a, draw = normal(1000), noise(1000, "t", device=CPU)
    own, shared = torch.tensor([1.2]).double(), torch.tensor([2.0]).double()
    want = []
    for x, k in zip(a.tolist(), draw.tolist()):
        x, u = max(-1.2, min(1.2, x)), (k + 32768.5) / 65536
        want.append(int(np.floor(x / 2 + u)))
    codes, scales = ternary(a, own, shared, draw)
    assert codes.tolist() == want
    mean = decode_sum(torch.empty_like(a), 50 * codes[None], scales[None], 8, 1000, torch.tensor(4.0))
    assert mean.tolist() == [25 * code for code in want]  # of a sum of 50 codes


def test_noise_depends_on_the_words_and_is_uniform():
    a = noise(100_001, 0, "layer", 3, 1, device=CPU)
    assert torch.equal(a, noise(100_001, 0, "layer", 3, 1, device=CPU))
    assert torch.equal(a[:1000], noise(1000, 0, "layer", 3, 1, device=CPU))
    for words in ((1, "layer", 3, 1), (0, "other", 3, 1), (0, "layer", 4, 1), (0, "layer", 3, 0)):
        assert (a == noise(100_001, *words, device=CPU)).float().mean() < 0.001
    for lane in range(4):  # of a 64-bit draw
        counts = torch.bincount(a[lane::4].int() + 32768 >> 10, minlength=64).double()
        assert counts.numel() == 64
        expected = counts.sum() / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square, 63 degrees: p = 1e-5


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("draw", ["gaussian", "heavy tails", "one sign", "mostly zero", "one block of two vanishes"])
def test_means_leave_what_is_orthogonal_to_them(draw, bits):
    """A projection: the error is orthogonal to what is decoded, so neither is ever longer than ``a``."""
    n, block, parts = 1 << 15, 64, 2
    a = normal(n)
    if draw == "heavy tails":
        a = a / normal(n, 1).abs().clamp(0.05)
    elif draw == "one sign":
        a = a.abs() + 1
    elif draw == "mostly zero":
        a = a * (normal(n, 2) > 2)
    elif draw == "one block of two vanishes":
        a = a * (torch.arange(n) // block % 2)
    codes, scales, means = encode_bins(a, bits, block, parts)
    sizes = (n * bits // 8, n // block, parts * 2**bits)
    assert [x.shape for x in (codes, scales, means)] == [(parts, size // parts) for size in sizes]
    decoded = decode_sum(torch.empty_like(a), codes[None], scales[None], bits, block, values=means[None])
    rows, two = (codes[:, None], scales[:, None]), torch.tensor(2.0)
    apart = decode_sum(torch.empty(n // parts, dtype=a.dtype), *rows, bits, block, two, values=means[:, None])
    torch.testing.assert_close(apart, decoded.view(parts, -1).mean(0))
    left = decode_sum(a.clone(), codes[None], scales[None], bits, block, values=means[None], take=True)
    torch.testing.assert_close(left, a - decoded)
    assert abs(float(left @ decoded)) <= 1e-9 * float(a @ a)
    assert float(left @ left) <= float(a @ a)
    if draw == "gaussian":
        assert float(left @ left) <= {1: 0.364, 2: 0.119}[bits] * float(a @ a)  # 1 - 2 / pi; Max's four equal bins
    if draw == "one block of two vanishes":
        assert not decoded.view(-1, 2, block)[:, 0].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_scale_of_means_says_what_is_not_finite(bad):
    a = normal(128)
    a[70] = bad
    for bits in (1, 2):
        _, scales, _ = encode_bins(a, bits, 64)
        assert scales.isfinite().tolist() == [[True, False]]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_may_be_pieces_of_messages(bits):
    """A row for each chunk; what is decoded of them and summed is what it is apart."""
    chunks, block = 3, 16
    a = normal(chunks * 5 * block)
    rows = [encode(x, bits, block) for x in a.view(chunks, -1)]
    codes = torch.zeros(chunks, rows[0][0].numel() + 8, dtype=torch.uint8)[:, 8:]
    scales = torch.zeros(chunks, 5 + 1, dtype=torch.float64)[:, :5]
    encode(a, bits, block, out=(codes, scales))
    for row in range(chunks):
        assert torch.equal(codes[row], rows[row][0])
        assert torch.equal(scales[row], rows[row][1])
    whole = decode_sum(torch.empty_like(a), codes[None], scales[None], bits, block)
    total = decode_sum(torch.empty(5 * block, dtype=a.dtype), codes, scales, bits, block)
    torch.testing.assert_close(total, whole.view(chunks, -1).sum(0))
    halved = decode_sum(torch.empty_like(total), codes, scales, bits, block, torch.tensor(2.0))
    assert torch.equal(halved, total / 2)
