"""Sign bits, eight in a byte, each standing for one of two values of its tensor.

``table`` holds these values: ``[T, 1]``, +v for a bit that is set, else -v; or ``[T, 2]``, the value of a set bit and
that of another. ``owner``, int32, says for each byte whose tensor's it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.packing import codes_of_bytes, look_up, pack_bits, packed, packed_bytes, unpacked

if TYPE_CHECKING:
    import triton.language as tl

_PACKED_BYTES = 1 << 13  # of packed bits: 64 Ki elements, which stay in a CPU's cache


def _sign_means(x: Tensor, tensors: Sequence[Tensor], sizes: Tensor, tiles: Tensor, levels: int) -> Tensor:
    """Return each tensor's mean |x|, [T, 1]; or, of 2 ``levels``, the means of its elements >= 0 and of those below.

    ``tensors``: pieces of ``x``, of ``sizes`` elements; ``tiles``: see ``Rows.tiles``.
    """
    if x.device.type == "meta":
        return x.new_empty(len(tensors), levels)
    if levels == 1:
        return (torch.stack(torch._foreach_norm([*tensors], 1)) / sizes)[:, None]
    above = torch.stack([(one >= 0).sum() for one in tensors])
    sums = [one.clamp(min=0).sum() for one in tensors], [one.clamp(max=0).sum() for one in tensors]
    counts = torch.stack([above, sizes - above])
    return (torch.stack([torch.stack(half) for half in sums]) / counts.clamp(min=1)).T.contiguous()


def _pack_signs(x: Tensor, ties: int = 0xFF, table: Tensor | None = None, owner: Tensor | None = None) -> Tensor:
    """Pack ``x > 0`` into uint8 ``[ceil(n / 8)]``, low bits first; ``ties``: the bits of a byte of zeros.

    With ``table``, take from ``x`` what its bits stand for.
    """
    if x.device.type == "meta" or not x.numel():
        return torch.empty(packed_bytes(x.numel(), 1), dtype=torch.uint8, device=x.device)
    bits = torch.cat([_signs(piece, ties) for piece in torch.split(x, 8 * _piece(x.device))])
    if table is not None and owner is not None:
        _add(x, bits[None], table[None].neg(), owner)
    return bits


def _signs(x: Tensor, ties: int) -> Tensor:
    return pack_bits(x >= 0) if ties == 0xFF else pack_bits(x > 0) | (pack_bits(x == 0) & ties)


def _sum_signs(
    out: Tensor, bits: Tensor, table: Tensor, owner: Tensor, *, majority: bool = False, divisor: Tensor | None = None
) -> Tensor:
    """Fill ``out`` [n] with the sum of what the rows of bits [P, ceil(n / 8)] stand for, by table [P, T, 1 or 2].

    Rows are added in order, so the result does not depend on the device. ``majority``: only the sum's sign. It is
    divided by ``divisor``, 0-dim.
    """
    if out.device.type != "meta":
        _add(out.zero_(), bits, table, owner)
        if majority:
            out.sign_()
        if divisor is not None:
            out.div_(divisor)
    return out


def _add(out: Tensor, bits: Tensor, table: Tensor, owner: Tensor) -> None:
    # For every possible byte, the 8 values that it stands for.
    high, low = table[..., 0], table[..., 1] if table.shape[2] == 2 else -table[..., 0]
    tables = torch.where(codes_of_bytes(1, out.device).bool(), high[..., None, None], low[..., None, None])
    tables, size = tables.view(len(bits), -1, 8), _piece(bits.device)
    for start in range(0, bits.shape[1], size):
        piece = out[8 * start : 8 * (start + size)]
        first = owner[start : start + size] * 256
        for values, row in zip(tables.unbind(), bits[:, start : start + size].unbind()):
            piece += look_up(values, first + row)[: piece.numel()]


def _piece(device: torch.device) -> int:
    return _PACKED_BYTES if device.type == "cpu" else 1 << 40


# --- on a GPU ---------------------------------------------------------------------------------------------------------

TILE = 1 << 11  # elements of one program
_BYTES = TILE // 8
_TURN = 128  # tiles whose sums are added at a time


@Kernel
def spread(x):  # type: ignore[no-untyped-def]
    """Repeat each element eight times."""
    for _ in tl.static_range(3):
        x = tl.interleave(x, x)
    return x


@Kernel
def values_of(table, owner, signs, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what signs stand for; ``owner``: of each eight of them."""
    high = tl.load(table + owner * LEVELS)
    low = -high if LEVELS == 1 else tl.load(table + owner * LEVELS + 1)
    return tl.where(signs, spread(high), spread(low))


@Kernel
def pack_signs_kernel(  # type: ignore[no-untyped-def]
    x, bits, table, owner, n, ties: int, LEVELS: tl.constexpr, BYTES: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BYTES
    element, at = first * 8 + tl.arange(0, BYTES * 8), first + tl.arange(0, BYTES)
    value = tl.load(x + element, element < n, -1.0)
    signs = (value > 0) | ((value == 0) & (((ties >> (tl.arange(0, BYTES * 8) & 7)) & 1) != 0))
    byte = tl.reshape(packed(tl.reshape(signs.to(tl.int32), (1, BYTES * 8)), 1), (BYTES,))
    tl.store(bits + at, byte.to(tl.uint8), at * 8 < n)
    if table is not None:
        value -= values_of(table, tl.load(owner + at, at * 8 < n, 0), signs, LEVELS)
        tl.store(x + element, value, element < n)


@Kernel
def sum_signs_kernel(  # type: ignore[no-untyped-def]
    out, bits, table, owner, divisor, n, count: int, bit_row: int, table_row: int,
    MAJORITY: tl.constexpr, LEVELS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BYTES
    element, at = first * 8 + tl.arange(0, BYTES * 8), first + tl.arange(0, BYTES)
    mine = tl.load(owner + at, at * 8 < n, 0)
    total = tl.zeros((BYTES * 8,), tl.float32)
    for _ in tl.range(0, count, loop_unroll_factor=4):
        byte = tl.load(bits + at, at * 8 < n, 0).to(tl.int32)
        total += values_of(table, mine, unpacked(byte, 1) != 0, LEVELS)
        bits += bit_row
        table += table_row
    if MAJORITY:
        total = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    if divisor is not None:
        total = tl.div_rn(total, tl.zeros_like(total) + tl.load(divisor))
    tl.store(out + element, total, element < n)


@Kernel
def halves_kernel(x, tiles, found, count: int, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write, for each tile, the sums of its elements >= 0 and of those below, and the number of the first."""
    begin, end = tl.load(tiles + tl.program_id(0)), tl.load(tiles + count + tl.program_id(0))
    at = begin + tl.arange(0, TILE)
    value = tl.load(x + at, at < end, 0.0)
    above = (value >= 0) & (at < end)
    mine = found + tl.program_id(0).to(tl.int64) * 4
    tl.store(mine, tl.sum(tl.where(above, value, 0.0), 0))
    tl.store(mine + 1, tl.sum(tl.where(above, 0.0, value), 0))
    tl.store(mine + 2, tl.sum(above.to(tl.int32), 0).to(tl.float32))


@Kernel
def sign_means_kernel(  # type: ignore[no-untyped-def]
    found, befores, sizes, table, LEVELS: tl.constexpr, TURN: tl.constexpr
):
    tensor = tl.program_id(0)
    begin, end = tl.load(befores + tensor), tl.load(befores + tensor + 1)
    column = tl.arange(0, 4)
    total = tl.zeros((4,), tl.float64)
    for start in range(begin, end, TURN):
        tile = start + tl.arange(0, TURN)
        at = tile[:, None] * 4 + column[None, :]
        total += tl.sum(tl.load(found + at, (tile < end)[:, None] & (column < 3)[None, :], 0.0).to(tl.float64), 0)
    high = tl.sum(tl.where(column == 0, total, 0.0), 0)
    low = tl.sum(tl.where(column == 1, total, 0.0), 0)
    above = tl.sum(tl.where(column == 2, total, 0.0), 0)
    size = tl.load(sizes + tensor).to(tl.float64)
    if LEVELS == 1:
        tl.store(table + tensor, ((high - low) / size).to(tl.float32))
    else:
        tl.store(table + tensor * 2, (high / tl.maximum(above, 1.0)).to(tl.float32))
        tl.store(table + tensor * 2 + 1, (low / tl.maximum(size - above, 1.0)).to(tl.float32))


@fused(_sign_means)
def sign_means(x: Tensor, tensors: Sequence[Tensor], sizes: Tensor, tiles: Tensor, levels: int) -> Tensor:
    table, count = x.new_empty(len(sizes), levels), (len(tiles) - len(sizes) - 1) // 2
    found = x.new_empty(count, 4)
    halves_kernel(count, x, tiles, found, count, TILE=TILE)
    sign_means_kernel(len(sizes), found, tiles[2 * count :], sizes, table, LEVELS=levels, TURN=_TURN)
    return table


@fused(_pack_signs)
def pack_signs(x: Tensor, ties: int = 0xFF, table: Tensor | None = None, owner: Tensor | None = None) -> Tensor:
    bits = torch.empty(packed_bytes(x.numel(), 1), dtype=torch.uint8, device=x.device)
    levels = 1 if table is None else table.shape[1]
    programs = -(-len(bits) // _BYTES)
    pack_signs_kernel(programs, x, bits, table, owner, x.numel(), ties, LEVELS=levels, BYTES=_BYTES)
    return bits


@fused(_sum_signs)
def sum_signs(
    out: Tensor, bits: Tensor, table: Tensor, owner: Tensor, *, majority: bool = False, divisor: Tensor | None = None
) -> Tensor:
    sum_signs_kernel(
        -(-bits.shape[1] // _BYTES),
        out, bits, table, owner, divisor, out.numel(), len(bits), bits.stride(0), table.stride(0),
        MAJORITY=majority, LEVELS=table.shape[2], BYTES=_BYTES,
    )  # fmt: skip
    return out
