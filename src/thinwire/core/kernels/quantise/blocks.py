"""Block codec: s = 2^(bits - 1) - 1 levels on either side of 0 (bits 2, 4, 8: 1, 7, 127).

For a block v of elements, with N = max|v| or |v|_2, a code is round(s v / N) + s, and stands for (code - s) N / s.
Rounding is to nearest even or, with noise, to one of the two neighbours so that the mean over draws is v. The last
block of a tensor may be shorter. A block with NaN or infinity has a scale that is not finite; its codes mean nothing.

Codes and scales may be pieces of messages: a row for each of equal chunks of the tensor, each of whole blocks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.packing import pack_codes, packed, packed_bytes, unpack_codes, unpacked

if TYPE_CHECKING:
    import triton.language as tl

BITS = (2, 4, 8)
_PIECE = 1 << 18  # number of elements: they stay in a CPU's cache, and calls cost little beside the work
STEP = 2.0**-16  # of the noise


def levels(bits: int) -> int:
    """Return the number of levels on either side of zero: 1, 7 or 127."""
    return int(2 ** (bits - 1)) - 1


def piece(block: int, device: torch.device) -> int:
    """Return how many elements, in whole blocks, go through all passes before the next ones do."""
    size = _PIECE if device.type == "cpu" else 1 << 40
    return block * max(1, size // block)


def _encode(
    a: Tensor,
    bits: int,
    block: int,
    norm: str = "max",
    noise: Tensor | None = None,
    *,
    leave_error: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return packed codes of ``a`` [n], uint8 ``[ceil(n bits / 8)]``, and scales N / s, ``[ceil(n / block)]``.

    ``block`` elements share a scale, with fewer than 8 bits a multiple of 8; N is their ``norm``, "max" or "l2". With
    ``noise``, int16 ``[n]`` uniform over all int16 (``seeding.noise``), codes are rounded at random, without bias up to
    2^-17 of a level; else to nearest even. ``leave_error`` takes from ``a`` what its (nearest) codes stand for.
    ``out``: where to write codes and scales, of ``a`` whole or a row for each chunk.
    """
    codes, scales = _empty(a, bits, block) if out is None else out
    if a.device.type != "meta":
        rows, tops = _rows(codes), _rows(scales)
        noises = [None] * len(rows) if noise is None else noise.view(len(rows), -1)
        for x, draw, code, scale in zip(a.view(len(rows), -1), noises, rows, tops):
            _encode_chunk(x, bits, block, norm, draw, leave_error, code, scale)
    return codes, scales


def _encode_chunk(
    a: Tensor, bits: int, block: int, norm: str, noise: Tensor | None, leave_error: bool, codes: Tensor, scales: Tensor
) -> None:
    n, s, size = a.numel(), levels(bits), piece(block, a.device)
    for start in range(0, n, size):
        x = a[start : start + size]
        count = x.numel()
        rows = torch.nn.functional.pad(x, (0, -count % block)).view(-1, block) if count % block else x.view(-1, block)
        top = largest(rows) if norm == "max" else torch.linalg.vector_norm(rows, dim=1)
        scale = torch.div(top, s, out=scales[start // block :][: len(rows)])
        level = rows.div(top.masked_fill(top == 0, 1)[:, None]).mul_(s)
        # NaN gets any code; its scale rejects the step. An int8 is what torch casts to fastest.
        if noise is None:
            made = level.round_().to(torch.int8).view(torch.uint8).add_(s)
        else:
            made = rounded_at_random(level, s, noise[start : start + count])
        if leave_error:
            rows.addcmul_(level, scale[:, None], value=-1)
            if count % block:
                x.copy_(rows.view(-1)[:count])
        first = start * bits // 8
        codes[first : first + packed_bytes(count, bits)] = pack_codes(made.view(-1)[:count], bits)


def _decode_sum(
    out: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, divisor: Tensor | None = None
) -> Tensor:
    """Fill ``out`` [n] with the sum of the decoded rows of codes [P, bytes] and scales [P, blocks], in their order.

    They may also be [P, chunks, ...]. The sum is divided by ``divisor``, 0-dim.
    """
    if out.device.type != "meta":
        codes, scales = _chunks(codes), _chunks(scales)
        for x, code, scale in zip(out.view(codes.shape[1], -1), codes.unbind(1), scales.unbind(1)):
            _decode_chunk(x, code, scale, bits, block)
        if divisor is not None:
            out.div_(divisor)
    return out


def _decode_chunk(out: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int) -> None:
    n, s, size = out.numel(), levels(bits), piece(block, out.device)
    for start in range(0, n, size):
        part = out[start : start + size]
        here = slice(start * bits // 8, packed_bytes(start + part.numel(), bits))
        signed = unpack_codes(codes[:, here], part.numel(), bits).sub(s).view(torch.int8)  # bytes wrap around
        for i, (level, scale) in enumerate(zip(signed, scales[:, start // block :])):
            add_scaled(part, level, scale, block, first=not i)


def add_scaled(out: Tensor, values: Tensor, scales: Tensor, block: int, *, first: bool) -> None:
    """Add to ``out`` [n] what a row's values stand for, or put it there: ``first``. Each block has a scale."""
    full = out.numel() // block * block
    for to, of, by in (
        (out[:full].view(-1, block), values[:full].view(-1, block), scales[: full // block, None]),
        (out[full:], values[full:], scales[full // block : full // block + 1]),
    ):
        if not to.numel():
            continue
        if first:
            torch.mul(of, by, out=to)
        else:
            to.addcmul_(of.to(out.dtype), by)


def _sum_encode(
    codes: Tensor, scales: Tensor, bits: int, block: int, out: tuple[Tensor, Tensor], error: Tensor | None = None
) -> None:
    """Encode the sum of decoded rows, to nearest, into ``out``. Add to ``error`` what its codes do not stand for."""
    total = scales.new_empty(scales.shape[1] * block)
    _encode(_decode_sum(total, codes, scales, bits, block), bits, block, leave_error=error is not None, out=out)
    if error is not None and error.device.type != "meta":
        error += total


def largest(rows: Tensor) -> Tensor:
    """Return max|x| of each row, in one pass less than by ``abs``."""
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def rounded_at_random(level: Tensor, s: int, noise: Tensor) -> Tensor:
    """Return uint8 codes 0 .. 2 s of levels, which are edited: the floor of level + u, with u in (0, 1)."""
    level.view(-1)[: noise.numel()].add_(noise, alpha=STEP)
    level.add_(s + 0.5 + STEP / 2).clamp_(0, 2 * s)  # not negative, so that the cast is the floor
    return level.to(torch.int16).to(torch.uint8)


def _empty(a: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(packed_bytes(a.numel(), bits), dtype=torch.uint8, device=a.device)
    return codes, a.new_empty(-(-a.numel() // block))


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


def _chunks(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[:, None]


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LARGEST_BLOCK = 1 << 12
_TILE = 1 << 11  # elements of one program: one block, or several whose tile is at most that large


@functools.cache
def tile_of(block: int) -> dict[str, Any]:
    """Return the constants of a program that works on ``ROWS`` blocks of at most ``WIDTH`` elements.

    Products are rounded before they are added, as in torch, but for those written as ``tl.fma``.
    """
    width = max(8, 1 << (block - 1).bit_length())
    return {
        "ROWS": max(1, _TILE // width),
        "WIDTH": width,
        "num_warps": max(8, width * 8 // _TILE),
        "enable_fp_fusion": False,
        **({} if torch.version.hip else {"maxnreg": 128}),  # else ptxas spills a little, to run more programs at once
    }


def programs_of(chunks: int, blocks: int, block: int) -> int:
    return chunks * -(-blocks // int(tile_of(block)["ROWS"]))


@Kernel
def place(n, size, blocks, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's chunk, its first block there, that one's first element, and how many elements follow."""
    tiles = tl.cdiv(blocks, ROWS)
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * ROWS
    begin = (chunk * blocks + first) * size
    there = tl.minimum((blocks - first) * size, n - begin)
    return chunk, first, begin, tl.minimum(there, ROWS * size).to(tl.int32)


@Kernel
def cells(size, limit, SHARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of a tile's cells, of ``SHARE`` elements each, and which of them exist."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH // SHARE)[None, :]
    inside = (column * SHARE < size) & (row * size + column * SHARE < limit)
    return row * (size // SHARE) + column, inside


@Kernel
def levelled(x, noise, at, inside, BITS: tl.constexpr, L2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the level of each element of a tile of blocks, and the blocks' scales."""
    S: tl.constexpr = (1 << (BITS - 1)) - 1
    if L2:
        top = tl.sqrt_rn(tl.sum(x * x, 1))
    else:  # as integers, magnitudes keep their order, and NaN is the largest
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    level = tl.div_rn(x, tl.where(top == 0, 1.0, top)[:, None]) * S
    if noise is None:
        level = (level + 12582912.0) - 12582912.0  # 1.5 2^23: what is below one is rounded to nearest even
    else:
        level += tl.load(noise + at, inside, 0).to(tl.float32) * 1.52587890625e-05
        level = tl.clamp(level + (S + 0.5 + 7.62939453125e-06), 0.0, 2.0 * S).to(tl.int32).to(tl.float32) - S
    return level, tl.div_rn(top, tl.full(top.shape, S, tl.float32))


@Kernel
def summed(  # type: ignore[no-untyped-def]
    codes, scales, count, code_row, scale_row, size, limit, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the sum of ``count`` decoded tiles, each ``code_row`` bytes and ``scale_row`` scales after the last."""
    S: tl.constexpr = (1 << (BITS - 1)) - 1
    at, inside = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for _ in tl.range(0, count, loop_unroll_factor=2):
        level = unpacked(tl.load(codes + at, inside, 0).to(tl.int32), BITS) - S
        scale = tl.load(scales + row, row * size < limit, 0.0)
        total = tl.fma(level.to(tl.float32), tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), total)
        codes += code_row
        scales += scale_row
    return total


@Kernel
def write_codes(  # type: ignore[no-untyped-def]
    codes, level, size, limit, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    S: tl.constexpr = (1 << (BITS - 1)) - 1
    _, exists = cells(size, limit, 1, ROWS, WIDTH)
    at, inside = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    tl.store(codes + at, packed(tl.where(exists, level.to(tl.int32) + S, 0), BITS).to(tl.uint8), inside)


@Kernel
def encode_kernel(  # type: ignore[no-untyped-def]
    a, noise, codes, scales, n, size, blocks: int, code_row, scale_row: int,
    BITS: tl.constexpr, L2: tl.constexpr, LEAVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    x = tl.load(a + begin + at, inside, 0.0)
    level, scale = levelled(x, noise if noise is None else noise + begin, at, inside, BITS, L2)
    tl.store(scales + chunk * scale_row + first + row, scale, row * size < limit)
    write_codes(codes + chunk * code_row + first * (size * BITS // 8), level, size, limit, BITS, ROWS, WIDTH)
    if LEAVE:
        tl.store(a + begin + at, tl.fma(-level, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), x), inside)


@Kernel
def decode_kernel(  # type: ignore[no-untyped-def]
    out, codes, scales, divisor, n, size, blocks: int,
    count: int, code_row, scale_row: int, code_chunk, scale_chunk: int,
    BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    codes += chunk * code_chunk + first * (size * BITS // 8)
    scales += chunk * scale_chunk + first
    total = summed(codes, scales, count, code_row, scale_row, size, limit, BITS, ROWS, WIDTH)
    if divisor is not None:
        total = tl.div_rn(total, tl.broadcast_to(tl.load(divisor), (ROWS, WIDTH)))
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    tl.store(out + begin + at, total, inside)


@Kernel
def sum_encode_kernel(  # type: ignore[no-untyped-def]
    codes, scales, made, tops, error, size, blocks: int, count: int, code_row, scale_row: int,
    BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    _, first, begin, limit = place(blocks * size, size, blocks, ROWS)
    skipped = first * (size * BITS // 8)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    total = summed(codes + skipped, scales + first, count, code_row, scale_row, size, limit, BITS, ROWS, WIDTH)
    total = tl.where(inside, total, 0.0)
    row = tl.arange(0, ROWS)
    level, scale = levelled(total, None, at, inside, BITS, False)
    tl.store(tops + first + row, scale, row * size < limit)
    write_codes(made + skipped, level, size, limit, BITS, ROWS, WIDTH)
    if error is not None:
        left = tl.fma(-level, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), total)
        tl.store(error + begin + at, tl.load(error + begin + at, inside, 0.0) + left, inside)


@fused(_encode, when=lambda a, bits, block, *_, **__: block <= LARGEST_BLOCK)
def encode(
    a: Tensor,
    bits: int,
    block: int,
    norm: str = "max",
    noise: Tensor | None = None,
    *,
    leave_error: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    codes, scales = made = _empty(a, bits, block) if out is None else out
    rows, tops = _rows(codes), _rows(scales)
    blocks = tops.shape[1]
    encode_kernel(
        programs_of(len(rows), blocks, block),
        a, noise, codes, scales, a.numel(), block, blocks, rows.stride(0), tops.stride(0),
        BITS=bits, L2=norm == "l2", LEAVE=leave_error, **tile_of(block),
    )  # fmt: skip
    return made


@fused(_decode_sum, when=lambda out, codes, scales, bits, block, *_, **__: block <= LARGEST_BLOCK)
def decode_sum(
    out: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, divisor: Tensor | None = None
) -> Tensor:
    rows, tops = _chunks(codes), _chunks(scales)
    count, chunks, blocks = tops.shape
    decode_kernel(
        programs_of(chunks, blocks, block),
        out, codes, scales, divisor, out.numel(), block, blocks,
        count, rows.stride(0), tops.stride(0), rows.stride(1), tops.stride(1),
        BITS=bits, **tile_of(block),
    )  # fmt: skip
    return out


@fused(_sum_encode, when=lambda codes, scales, bits, block, *_, **__: block <= LARGEST_BLOCK)
def sum_encode(
    codes: Tensor, scales: Tensor, bits: int, block: int, out: tuple[Tensor, Tensor], error: Tensor | None = None
) -> None:
    sum_encode_kernel(
        programs_of(1, scales.shape[1], block),
        codes, scales, *out, error, block, scales.shape[1], len(codes), codes.stride(0), scales.stride(0),
        BITS=bits, **tile_of(block),
    )  # fmt: skip
