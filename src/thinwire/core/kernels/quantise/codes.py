"""Codes, whatever rule makes them: packed in bytes, low bits first, and decoded to the sum of what they stand for.

An element is a value times its block's scale. The value is ``code - s`` (linear codes, 2, 4 or 8 bits), the code itself
(int8: codes that may be summed), or what a table says of the code (bins, 1 or 2 bits). Codes and scales may be pieces
of messages: a row for each of equal chunks of the tensor, each of whole blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused

if TYPE_CHECKING:
    import triton.language as tl

_PIECE = 1 << 18  # number of elements: they stay in a CPU's cache, and calls cost little beside the work
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # to read that many codes, of one byte each, as one integer
_ROWS_AS = {8: torch.float64, 16: torch.complex128}  # by number of bytes


def packed_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def piece(block: int, device: torch.device) -> int:
    """Return how many elements, in whole blocks, go through all passes before the next ones do."""
    size = _PIECE if device.type == "cpu" else 1 << 40
    return block * max(1, size // block)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[n]`` below 2^bits into uint8 ``[ceil(n bits / 8)]``: low bits first, padded with 0."""
    per = 8 // bits
    if per == 1:
        return codes
    n = codes.numel()
    if n % per or codes.storage_offset() % per or not codes.is_contiguous():
        padded = codes.new_zeros(n + -n % per)
        padded[:n] = codes
        codes = padded
    # Read as one integer, code j is at bit 8 j; the product moves it to the last byte's bit j bits, without carries.
    last = 8 * (per - 1)
    gather = sum(1 << (last - (8 - bits) * j) for j in range(per))
    return ((codes.view(_WIDE[per]) * gather) >> last).to(torch.uint8)


def unpack_codes(packed: Tensor, n: int, bits: int) -> Tensor:
    if bits == 8:
        return packed[..., :n]
    wide = packed.to(_WIDE[8 // bits])
    if bits == 2:  # to the two halves of an integer, then to its four bytes
        wide = (wide | (wide << 12)) & 0x000F000F
        wide = (wide | (wide << 6)) & 0x03030303
    else:
        wide = (wide | (wide << 4)) & 0x0F0F
    return wide.view(torch.uint8)[..., :n]


def codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Return the codes, of that many bits each, low bits first, that every byte holds: [256, 8 / bits]."""
    every, shifts = torch.arange(256, device=device), torch.arange(0, 8, bits, device=device)
    codes: Tensor = (every[:, None] >> shifts) & (2**bits - 1)
    return codes


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table, one after another. Short rows are gathered as one wide number, which is faster."""
    wide = _ROWS_AS.get(table.shape[1] * table.element_size())
    if wide is not None:
        table, narrow = table.view(wide).view(-1), table.dtype
        return table.index_select(0, index).view(narrow)
    return table.index_select(0, index).view(-1)


def levels(bits: int) -> int:
    """Return the number s of levels on either side of zero: 1, 7 or 127."""
    return int(2 ** (bits - 1)) - 1


def _decode_sum(
    out: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    bits: int,
    block: int,
    divisor: Tensor | None = None,
    *,
    values: Tensor | None = None,
    owner: Tensor | None = None,
    take: bool = False,
) -> Tensor:
    """Fill ``out`` [n] with the sum of P decoded rows, divided by ``divisor``, 0-dim; ``take``: subtract it there.

    ``codes`` [P, bytes] and ``scales`` [P, blocks], or [P, chunks, ...]; scales None: 1. ``values`` [P, chunks, 2^bits]
    is what the codes of each chunk stand for; or, with ``owner``, int32 [bytes], and blocks of one byte each,
    [P, owners, 2^bits], of which each byte has a row. None: codes are linear.
    """
    if out.device.type == "meta":
        return out
    codes, scales = _chunks(codes), None if scales is None else _chunks(scales)
    if values is not None:  # for every row and byte, the numbers that it stands for
        tables = (-values if take else values)[..., codes_of_bytes(bits, out.device)].flatten(1, 2)
    size, zero = piece(block, out.device), _zero(codes, bits)
    for k, whole in enumerate(out.view(codes.shape[1], -1)):
        for start in range(0, len(whole), size):
            part = whole[start : start + size]
            n, first = len(part), start // block
            here = codes[:, k, start * bits // 8 : packed_bytes(start + n, bits)]
            found: Iterable[Tensor]
            if values is None:
                found = unpack_codes(here, n, bits).sub(zero).view(torch.int8).unbind()  # bytes wrap around
            else:
                at = 256 * (k if owner is None else owner[first : first + here.shape[1]])
                found = (look_up(table, at + row)[:n] for table, row in zip(tables, here.int()))
            for i, value in enumerate(found):
                scale = None if scales is None else scales[i, k, first:]
                _add_scaled(part, value, scale, block, fill=not (i or take))
    return out if divisor is None else out.div_(divisor)


def _add_scaled(out: Tensor, values: Tensor, scales: Tensor | None, block: int, *, fill: bool) -> None:
    """Add to ``out`` [n] a row's values times their blocks' scales, or put them there: ``fill``."""
    if scales is None:
        torch.add(values, 0, out=out) if fill else out.add_(values)
        return
    full = out.numel() // block * block
    for to, of, by in (
        (out[:full].view(-1, block), values[:full].view(-1, block), scales[: full // block, None]),
        (out[full:], values[full:], scales[full // block : full // block + 1]),
    ):
        if not to.numel():
            continue
        if fill:
            torch.mul(of, by, out=to)
        else:
            to.addcmul_(of.to(out.dtype), by)


def _chunks(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[:, None]


def _zero(codes: Tensor, bits: int) -> int:
    """Return the linear code of 0."""
    return 0 if codes.dtype == torch.int8 else levels(bits)


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
def write_codes(  # type: ignore[no-untyped-def]
    codes, code, size, limit, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Pack the int32 codes of a tile of blocks, 0 beside its last element, and write them."""
    at, inside = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    HALVINGS: tl.constexpr = 3 if BITS == 1 else (2 if BITS == 2 else 8 // BITS - 1)
    for i in tl.static_range(HALVINGS):
        even, odd = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
        code = even | (odd << (BITS << i))
    tl.store(codes + at, code.to(tl.uint8), inside)


@Kernel
def unpacked(codes, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unpack the columns of a tile of int32 bytes: ``[rows, columns BITS / 8]`` to ``[rows, columns]``."""
    HALVINGS: tl.constexpr = 3 if BITS == 1 else (2 if BITS == 2 else 8 // BITS - 1)
    for i in tl.static_range(HALVINGS):
        codes = tl.interleave(codes & ((1 << (4 >> i)) - 1), codes >> (4 >> i))
    return codes


@Kernel
def decode_kernel(  # type: ignore[no-untyped-def]
    out, codes, scales, values, owner, divisor, n, size, blocks: int, count: int,
    code_row, scale_row: int, value_row: int, code_chunk, scale_chunk: int, value_chunk: int,
    BITS: tl.constexpr, ZERO: tl.constexpr, TAKE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    byte, within = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    codes += chunk * code_chunk + first * (size * BITS // 8)
    if scales is not None:
        scales += chunk * scale_chunk + first
    if values is not None:
        mine = values + chunk * value_chunk
        if owner is not None:
            mine += (tl.load(owner + first + row, row * size < limit, 0) << BITS)[:, None]
    total = tl.load(out + begin + at, inside, 0.0) if TAKE else tl.zeros((ROWS, WIDTH), tl.float32)
    for _ in tl.range(0, count, loop_unroll_factor=2):
        code = unpacked(tl.load(codes + byte, within, 0).to(tl.int32), BITS)
        if values is None:
            value = (code - ZERO).to(tl.float32)
        else:
            value = tl.zeros((ROWS, WIDTH), tl.float32)
            for j in tl.static_range(1 << BITS):
                value = tl.where(code == j, tl.load(mine + j), value)
            mine += value_row
        if TAKE:
            value = -value
        if scales is None:
            total += value
        else:
            scale = tl.load(scales + row, row * size < limit, 0.0)
            total = tl.fma(value, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), total)
            scales += scale_row
        codes += code_row
    if divisor is not None:
        total = tl.div_rn(total, tl.broadcast_to(tl.load(divisor), (ROWS, WIDTH)))
    tl.store(out + begin + at, total, inside)


@fused(_decode_sum, when=lambda out, codes, scales, bits, block, *_, **__: block <= LARGEST_BLOCK)
def decode_sum(
    out: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    bits: int,
    block: int,
    divisor: Tensor | None = None,
    *,
    values: Tensor | None = None,
    owner: Tensor | None = None,
    take: bool = False,
) -> Tensor:
    given = [None if x is None else _chunks(x) for x in (codes, scales, values)]
    rows, chunks = ([0 if x is None else x.stride(i) for x in given] for i in (0, 1))
    count, parts = _chunks(codes).shape[:2]
    blocks = -(-out.numel() // parts // block)
    decode_kernel(
        programs_of(parts, blocks, block),
        out, codes, scales, values, owner, divisor, out.numel(), block, blocks, count, *rows, *chunks,
        BITS=bits, ZERO=_zero(codes, bits), TAKE=take, **tile_of(block),
    )  # fmt: skip
    return out
