"""Bins: a code says into which bin an element of a block fell, and stands for the mean of what fell there.

2 bits: a block's unit u is its root mean square. Three bounds, -w u, 0 and w u, make four bins; their means, in units,
are of a whole message, and sent with the codes. 1 bit: u is the mean of |v|, and 0 the only bound; or signs, without
units, whose means are those of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.codes import (
    LARGEST_BLOCK,
    cells,
    pack_codes,
    packed_bytes,
    piece,
    place,
    programs_of,
    tile_of,
    write_codes,
)

if TYPE_CHECKING:
    import triton.language as tl

_BOUND = 0.9957  # between two of four bins, in standard deviations, with least error for a Gaussian: Max, 1960


def _encode_bins(
    a: Tensor,
    bits: int,
    block: int,
    parts: int = 1,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of 1 or 2 bits, uint8 ``[parts, bytes]``, scales ``[parts, blocks]``, means ``[parts, 2^bits]``.

    The means, in units of scales, have the least squared error that these bins allow, so the decoded vector is never
    longer than ``a`` [n]. ``block`` is a multiple of 8; each of the equal ``parts``, of whole blocks, has own means.
    ``out``: where to write.
    """
    codes, scales, means = made = _empty(a, bits, block, parts) if out is None else out
    if a.device.type != "meta":
        for x, code, scale, mean in zip(a.view(parts, -1), codes, scales, means):
            _encode_part(x, bits, block, code, scale, mean)
    return made


def _encode_part(a: Tensor, bits: int, block: int, codes: Tensor, scales: Tensor, means: Tensor) -> None:
    n, size, bound = a.numel(), piece(block, a.device), _bound(bits)
    found = a.new_empty(2, 2**bits, n // block)  # sums and counts of each bin of each block
    for start in range(0, n, size):
        rows = a[start : start + size].view(-1, block)
        here = slice(start // block, start // block + len(rows))
        unit = torch.linalg.vector_norm(rows, bits, dim=1).div_(block ** (1 / bits))
        scales[here] = unit
        y = rows.div(unit.masked_fill(unit == 0, 1).mul_(bound)[:, None])
        made, found[:, :, here] = _four_bins(y) if bits == 2 else _two_bins(y)
        codes[start * bits // 8 : (start + rows.numel()) * bits // 8] = pack_codes(made.view(-1), bits)
    sums, counts = (found * scales.double().square()).sum(-1)
    means.copy_((sums / counts.masked_fill_(counts == 0, 1)).mul_(bound))


def _two_bins(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each element is at least 0, and each row's sum and number in each bin, ``[2, 2, rows]``."""
    above = y >= 0
    count, high = above.sum(1, dtype=y.dtype), y.clamp(min=0).sum(1)
    found = torch.stack([y.sum(1) - high, high, y.shape[1] - count, count])
    return above.view(torch.uint8), found.view(2, 2, -1)


def _four_bins(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each element's bin (bounds -1, 0, 1), and each row's sum and number in each bin, ``[2, 4, rows]``.

    ``y`` is edited. Sums of clamped rows give both in a fifth of the time that torch's weighted histogram takes.
    """
    block = y.shape[1]
    total, positive = y.sum(1), y.clamp(min=0).sum(1)
    below, above = y.clamp(max=-1).sum(1), y.clamp(min=1).sum(1)
    bins = y.floor_().add_(2).clamp_(0, 3)
    first, second, third = bins.clamp(max=1).sum(1), bins.clamp(1, 2).sum(1), bins.clamp(min=2).sum(1)
    lowest, highest = below + first, above + third - 3 * block  # a clamped element counts as the bound
    sums = [lowest, total - positive - lowest, positive - highest, highest]
    counts = [block - first, first - second + block, second - third + block, third - 2 * block]
    return bins.to(torch.int8).view(torch.uint8), torch.stack([*sums, *counts]).view(2, 4, -1)


def _bound(bits: int) -> float:
    return _BOUND if bits == 2 else 1.0


def _empty(a: Tensor, bits: int, block: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(parts, a.numel() // parts * bits // 8, dtype=torch.uint8, device=a.device)
    return codes, a.new_empty(parts, a.numel() // parts // block), a.new_empty(parts, 2**bits)


def _pack_signs(x: Tensor) -> Tensor:
    """Return whether each element is at least 0, in bits: uint8 ``[ceil(n / 8)]``."""
    if x.device.type == "meta" or not x.numel():
        return x.new_empty(packed_bytes(x.numel(), 1), dtype=torch.uint8)
    return torch.cat([pack_codes((part >= 0).view(torch.uint8), 1) for part in x.split(piece(8, x.device))])


def _means_of_sides(x: Tensor, tensors: Sequence[Tensor], sizes: Tensor, tiles: Tensor) -> Tensor:
    """Return the mean of each tensor's elements below 0, and of the others: ``[T, 2]``.

    ``tensors``: pieces of ``x``, of ``sizes`` elements; ``tiles``: see ``Rows.tiles``, of ``TILE``.
    """
    if x.device.type == "meta":
        return x.new_empty(len(tensors), 2)
    above = torch.stack([(one >= 0).sum() for one in tensors])
    sums = [one.clamp(max=0).sum() for one in tensors], [one.clamp(min=0).sum() for one in tensors]
    counts = torch.stack([sizes - above, above])
    return (torch.stack([torch.stack(half) for half in sums]) / counts.clamp(min=1)).T.contiguous()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

TILE = 1 << 11  # elements of one program that sums a tensor's sides
_TURN = 256  # programs whose sums are added at a time


@Kernel
def of_bin(number, y, code, inside, weight):  # type: ignore[no-untyped-def]
    """Return the sum and the number of each row's elements in a bin, weighted: ``[rows, 2]``."""
    here = inside & (code == number)
    sums, counts = tl.sum(tl.where(here, y, 0.0), 1), tl.sum(here.to(tl.int32), 1)
    return tl.join(sums.to(tl.float64) * weight, counts.to(tl.float64) * weight)


@Kernel
def bins_kernel(  # type: ignore[no-untyped-def]
    a, codes, scales, found, n, size, blocks: int, code_row, scale_row: int, root,
    BITS: tl.constexpr, BOUND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write codes, and the scales and, for each program, the sums and numbers of its elements in each bin, if asked."""
    BINS: tl.constexpr = 1 << BITS
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    y = tl.load(a + begin + at, inside, 0.0)
    if scales is not None:
        total = tl.sqrt_rn(tl.sum(y * y, 1)) if BITS == 2 else tl.sum(tl.abs(y), 1)
        unit = tl.div_rn(total, tl.zeros((ROWS,), tl.float32) + root)
        tl.store(scales + chunk * scale_row + first + row, unit, row * size < limit)
        y = tl.div_rn(y, tl.broadcast_to((tl.where(unit == 0, 1.0, unit) * BOUND)[:, None], (ROWS, WIDTH)))
    if BITS == 2:
        code = (tl.clamp(tl.floor(y), -2.0, 1.0) + 2).to(tl.int32)
    else:
        code = ((y >= 0) & inside).to(tl.int32)
    write_codes(codes + chunk * code_row + first * (size * BITS // 8), code, size, limit, BITS, ROWS, WIDTH)
    if scales is not None:
        weight = unit.to(tl.float64)
        weight = tl.where(row * size < limit, weight * weight, 0.0)
        if BITS == 2:
            even = tl.join(of_bin(0, y, code, inside, weight), of_bin(2, y, code, inside, weight))
            rows = tl.join(even, tl.join(of_bin(1, y, code, inside, weight), of_bin(3, y, code, inside, weight)))
        else:
            rows = tl.join(of_bin(0, y, code, inside, weight), of_bin(1, y, code, inside, weight))
        mine = found + tl.program_id(0).to(tl.int64) * (2 * BINS) + tl.arange(0, 2 * BINS)
        tl.store(mine, tl.reshape(tl.sum(rows, 0), (2 * BINS,)))


@Kernel
def sides_kernel(x, tiles, found, count: int, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write, for each tile, what ``bins_kernel`` writes for a program: of signs, without units."""
    begin, end = tl.load(tiles + tl.program_id(0)), tl.load(tiles + count + tl.program_id(0))
    at = begin + tl.arange(0, TILE)
    value = tl.load(x + at, at < end, 0.0)[None, :]
    code, there = (value >= 0).to(tl.int32), (at < end)[None, :]
    one = tl.full((1,), 1.0, tl.float64)
    rows = tl.join(of_bin(0, value, code, there, one), of_bin(1, value, code, there, one))
    tl.store(found + tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4), tl.reshape(rows, (4,)))


@Kernel
def means_kernel(  # type: ignore[no-untyped-def]
    found, befores, means, programs: int, mean_row: int, BOUND: tl.constexpr, BINS: tl.constexpr, TURN: tl.constexpr
):
    """Turn a part's sums and numbers into its means; ``befores``: the programs before each part and before the end."""
    part, column = tl.program_id(0).to(tl.int64), tl.arange(0, 2 * BINS)
    if befores is None:
        begin, end = part * programs, (part + 1) * programs
    else:
        begin, end = tl.load(befores + part), tl.load(befores + part + 1)
    total = tl.zeros((2 * BINS,), tl.float64)
    for start in range(begin, end, TURN):
        tile = start + tl.arange(0, TURN)
        at = tile[:, None] * (2 * BINS) + column[None, :]
        total += tl.sum(tl.load(found + at, (tile < end)[:, None], 0.0), 0)
    sums, counts = tl.split(tl.trans(tl.reshape(total, (2, BINS))))
    mean = sums / tl.where(counts == 0, 1.0, counts) * BOUND
    tl.store(means + part * mean_row + tl.arange(0, BINS), mean.to(tl.float32))


@fused(_encode_bins, when=lambda a, bits, block, *_, **__: block <= LARGEST_BLOCK)
def encode_bins(
    a: Tensor,
    bits: int,
    block: int,
    parts: int = 1,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, means = made = _empty(a, bits, block, parts) if out is None else out
    blocks, bound = scales.shape[1], _bound(bits)
    programs = programs_of(parts, blocks, block)
    found = torch.empty(programs, 2, 2**bits, dtype=torch.float64, device=a.device)
    bins_kernel(
        programs,
        a, codes, scales, found, a.numel(), block, blocks, codes.stride(0), scales.stride(0), block ** (1 / bits),
        BITS=bits, BOUND=bound, **tile_of(block),
    )  # fmt: skip
    means_kernel(parts, found, None, means, programs // parts, means.stride(0), BOUND=bound, BINS=2**bits, TURN=_TURN)
    return made


@fused(_pack_signs)
def pack_signs(x: Tensor) -> Tensor:
    bits = x.new_empty(packed_bytes(x.numel(), 1), dtype=torch.uint8)
    n, tile = len(bits), tile_of(8)
    bins_kernel(programs_of(1, n, 8), x, bits, None, None, x.numel(), 8, n, 0, 0, 1.0, BITS=1, BOUND=1.0, **tile)
    return bits


@fused(_means_of_sides)
def means_of_sides(x: Tensor, tensors: Sequence[Tensor], sizes: Tensor, tiles: Tensor) -> Tensor:
    means, count = x.new_empty(len(sizes), 2), (len(tiles) - len(sizes) - 1) // 2
    found = torch.empty(count, 4, dtype=torch.float64, device=x.device)
    sides_kernel(count, x, tiles, found, count, TILE=TILE)
    means_kernel(len(sizes), found, tiles[2 * count :], means, 0, 2, BOUND=1.0, BINS=2, TURN=_TURN)
    return means
