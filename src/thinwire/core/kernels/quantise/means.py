"""Means codec, 2 bits: a block's unit u is its root mean square. Three bounds, -w u, 0 and w u, make four bins; a code
stands for the mean of what fell into its bin, in units. The means are sent with the codes. 1 bit: u is the mean of |v|,
and 0 the only bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.blocks import (
    LARGEST_BLOCK,
    add_scaled,
    cells,
    piece,
    place,
    programs_of,
    tile_of,
)
from thinwire.core.kernels.quantise.packing import codes_of_bytes, look_up, pack_codes, packed, unpacked

if TYPE_CHECKING:
    import triton.language as tl

_BOUND = 0.9957  # between two of four bins, in standard deviations, with least error for a Gaussian: Max, 1960


def _encode_means(
    a: Tensor,
    bits: int,
    block: int,
    parts: int = 1,
    *,
    leave_error: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of 1 or 2 bits, uint8 ``[parts, bytes]``, scales ``[parts, blocks]``, means ``[parts, 2^bits]``.

    The means, in units of scales, have the least squared error that these bins allow, so the decoded vector is never
    longer than ``a`` [n]. ``block`` is a multiple of 8; each of the equal ``parts``, of whole blocks, has own means.
    ``leave_error`` takes from ``a`` what its codes stand for. ``out``: where to write.
    """
    codes, scales, means = made = _empty(a, bits, block, parts) if out is None else out
    if a.device.type == "meta":
        return made
    for x, code, scale, mean in zip(a.view(parts, -1), codes, scales, means):
        _encode_part(x, bits, block, code, scale, mean)
    if leave_error:
        _add_decoded(a, codes[None], scales[None], means[None].neg(), bits, block, fill=False)
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


def _decode_means(
    out: Tensor, codes: Tensor, scales: Tensor, means: Tensor, bits: int, block: int, divisor: Tensor | None = None
) -> Tensor:
    """Fill ``out`` [n] with the sum of the decoded rows of codes, scales and means, [P, parts, ..], in their order.

    The sum is divided by ``divisor``, 0-dim.
    """
    if out.device.type != "meta":
        _add_decoded(out, codes, scales, means, bits, block, fill=True)
        if divisor is not None:
            out.div_(divisor)
    return out


def _add_decoded(
    out: Tensor, codes: Tensor, scales: Tensor, means: Tensor, bits: int, block: int, *, fill: bool
) -> None:
    parts, size = codes.shape[1], piece(block, out.device)
    held = codes_of_bytes(bits, out.device)  # for every byte, the numbers that it stands for
    for k, whole in enumerate(out.view(parts, -1)):
        tables = [mean[held] for mean in means[:, k]]
        for start in range(0, len(whole), size):
            part = whole[start : start + size]
            here = slice(start * bits // 8, (start + len(part)) * bits // 8)
            for i, table in enumerate(tables):
                values = look_up(table, codes[i, k, here].int())
                add_scaled(part, values, scales[i, k, start // block :], block, first=fill and not i)


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


# --- on a GPU ---------------------------------------------------------------------------------------------------------

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
    """Write codes, scales and, for each program, the sums and numbers of its elements in each bin."""
    BINS: tl.constexpr = 1 << BITS
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    x = tl.load(a + begin + at, inside, 0.0)
    total = tl.sqrt_rn(tl.sum(x * x, 1)) if BITS == 2 else tl.sum(tl.abs(x), 1)
    unit = tl.div_rn(total, tl.zeros((ROWS,), tl.float32) + root)
    tl.store(scales + chunk * scale_row + first + row, unit, row * size < limit)
    y = tl.div_rn(x, tl.broadcast_to((tl.where(unit == 0, 1.0, unit) * BOUND)[:, None], (ROWS, WIDTH)))
    if BITS == 2:
        code = (tl.clamp(tl.floor(y), -2.0, 1.0) + 2).to(tl.int32)
    else:
        code = (y >= 0).to(tl.int32)
    byte, within = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    tl.store(codes + chunk * code_row + first * (size * BITS // 8) + byte, packed(code, BITS).to(tl.uint8), within)
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
def means_kernel(  # type: ignore[no-untyped-def]
    found, means, programs: int, mean_row: int, BOUND: tl.constexpr, BINS: tl.constexpr, TURN: tl.constexpr
):
    """Turn a chunk's sums and numbers into its means."""
    part, column = tl.program_id(0).to(tl.int64), tl.arange(0, 2 * BINS)
    total = tl.zeros((2 * BINS,), tl.float64)
    for start in range(0, programs, TURN):
        tile = start + tl.arange(0, TURN)
        at = (part * programs + tile)[:, None] * (2 * BINS) + column[None, :]
        total += tl.sum(tl.load(found + at, (tile < programs)[:, None], 0.0), 0)
    sums, counts = tl.split(tl.trans(tl.reshape(total, (2, BINS))))
    mean = sums / tl.where(counts == 0, 1.0, counts) * BOUND
    tl.store(means + part * mean_row + tl.arange(0, BINS), mean.to(tl.float32))


@Kernel
def add_means_kernel(  # type: ignore[no-untyped-def]
    out, codes, scales, means, divisor, n, size, blocks: int,
    count: int, code_row, scale_row: int, mean_row: int, code_chunk, scale_chunk: int, mean_chunk: int,
    BITS: tl.constexpr, TAKE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the sum of ``count`` decoded rows; ``TAKE``: subtract it from what is there."""
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    byte, within = cells(size, limit, 8 // BITS, ROWS, WIDTH)
    row = tl.arange(0, ROWS)
    codes += chunk * code_chunk + first * (size * BITS // 8)
    scales += chunk * scale_chunk + first
    means += chunk * mean_chunk
    total = tl.load(out + begin + at, inside, 0.0) if TAKE else tl.zeros((ROWS, WIDTH), tl.float32)
    for _ in range(count):
        code = unpacked(tl.load(codes + byte, within, 0).to(tl.int32), BITS)
        scale = tl.load(scales + row, row * size < limit, 0.0)
        value = tl.zeros((ROWS, WIDTH), tl.float32)
        for j in tl.static_range(1 << BITS):
            value = tl.where(code == j, tl.load(means + j), value)
        total = tl.fma(-value if TAKE else value, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), total)
        codes += code_row
        scales += scale_row
        means += mean_row
    if divisor is not None:
        total = tl.div_rn(total, tl.broadcast_to(tl.load(divisor), (ROWS, WIDTH)))
    tl.store(out + begin + at, total, inside)


def _add_means(
    out: Tensor, codes: Tensor, scales: Tensor, means: Tensor, bits: int, block: int, divisor: Tensor | None, take: bool
) -> None:
    count, parts, blocks = scales.shape
    rows, chunks = ([x.stride(i) for x in (codes, scales, means)] for i in (0, 1))
    add_means_kernel(
        programs_of(parts, blocks, block),
        out, codes, scales, means, divisor, out.numel(), block, blocks, count, *rows, *chunks,
        BITS=bits, TAKE=take, **tile_of(block),
    )  # fmt: skip


@fused(_encode_means, when=lambda a, bits, block, *_, **__: block <= LARGEST_BLOCK)
def encode_means(
    a: Tensor,
    bits: int,
    block: int,
    parts: int = 1,
    *,
    leave_error: bool = False,
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
    means_kernel(parts, found, means, programs // parts, means.stride(0), BOUND=bound, BINS=2**bits, TURN=_TURN)
    if leave_error:
        _add_means(a, codes[None], scales[None], means[None], bits, block, None, take=True)
    return made


@fused(_decode_means, when=lambda out, codes, scales, means, bits, block, *_, **__: block <= LARGEST_BLOCK)
def decode_means(
    out: Tensor, codes: Tensor, scales: Tensor, means: Tensor, bits: int, block: int, divisor: Tensor | None = None
) -> Tensor:
    _add_means(out, codes, scales, means, bits, block, divisor, take=False)
    return out
