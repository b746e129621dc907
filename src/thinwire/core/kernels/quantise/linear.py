"""Linear codes: s = 2^(bits - 1) - 1 levels on either side of 0 (bits 2, 4, 8: 1, 7, 127).

For a block v of elements, with N = max|v| or |v|_2, or what all ranks share, a code is round(s v / N) + s, and stands
for (code - s) N / s. Rounding is to nearest even or, with noise, to one of the two neighbours so that the mean over
draws is v. The last block of a tensor may be shorter. A block with NaN or infinity has a scale that is not finite; its
codes mean nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.codes import (
    LARGEST_BLOCK,
    cells,
    levels,
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

BITS = (2, 4, 8)
STEP = 2.0**-16  # of the noise


def _encode(
    a: Tensor,
    bits: int,
    block: int,
    norm: str = "max",
    noise: Tensor | None = None,
    *,
    leave_error: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return packed codes of ``a`` [n], uint8 ``[ceil(n bits / 8)]``, and scales N / s, ``[ceil(n / block)]``.

    ``block`` elements share a scale, with fewer than 8 bits a multiple of 8; N is their ``norm``, "max" or "l2". With
    ``noise``, int16 ``[n]`` uniform over all int16 (``seeding.noise``), codes are rounded at random, without bias up to
    2^-17 of a level; else to nearest even. ``leave_error`` takes from ``a`` what its (nearest) codes stand for.
    ``out``: where to write codes and scales, of ``a`` whole or a row for each chunk. ``shared``: a limit for each
    block's magnitudes, and N; codes are then levels, int8 ``[n]``, which ranks with equal N may sum.
    """
    codes, scales = _empty(a, bits, block, shared is not None) if out is None else out
    if a.device.type != "meta":
        rows, tops = _rows(codes), _rows(scales)
        noises = [None] * len(rows) if noise is None else noise.view(len(rows), -1)
        for x, draw, code, scale in zip(a.view(len(rows), -1), noises, rows, tops):
            _encode_chunk(x, bits, block, norm, draw, leave_error, code, scale, shared)
    return codes, scales


def _encode_chunk(
    a: Tensor, bits: int, block: int, norm: str, noise: Tensor | None, leave_error: bool, codes: Tensor, scales: Tensor,
    shared: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    n, s, size = a.numel(), levels(bits), piece(block, a.device)
    for start in range(0, n, size):
        x = a[start : start + size]
        count = x.numel()
        rows = torch.nn.functional.pad(x, (0, -count % block)).view(-1, block) if count % block else x.view(-1, block)
        of = slice(start // block, start // block + len(rows))
        if shared is None:
            top = _largest(rows) if norm == "max" else torch.linalg.vector_norm(rows, dim=1)
        else:
            most, top = shared[0][of, None], shared[1][of]
            rows = rows.clamp(-most, most)
        scale = torch.div(top, s, out=scales[of])
        level = rows.div(top.masked_fill(top == 0, 1)[:, None]).mul_(s)
        # NaN gets any code; its scale rejects the step. An int8 is what torch casts to fastest.
        if noise is None:
            made = level.round_().to(torch.int8).view(torch.uint8).add_(s)
        else:  # the floor of level + u, with u in (0, 1)
            level.view(-1)[:count].add_(noise[start : start + count], alpha=STEP)
            level.add_(s + 0.5 + STEP / 2).clamp_(0, 2 * s)  # not negative, so that the cast is the floor
            made = level.to(torch.int16).to(torch.uint8)
        if leave_error:
            rows.addcmul_(level, scale[:, None], value=-1)
            if count % block:
                x.copy_(rows.view(-1)[:count])
        if shared is None:
            codes[start * bits // 8 : packed_bytes(start + count, bits)] = pack_codes(made.view(-1)[:count], bits)
        else:
            torch.sub(made.view(-1)[:count].view(torch.int8), s, out=codes[start : start + count])


def _largest(rows: Tensor) -> Tensor:
    """Return max|x| of each row, in one pass less than by ``abs``."""
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def _empty(a: Tensor, bits: int, block: int, levels: bool) -> tuple[Tensor, Tensor]:
    n, dtype = (a.numel(), torch.int8) if levels else (packed_bytes(a.numel(), bits), torch.uint8)
    return a.new_empty(n, dtype=dtype), a.new_empty(-(-a.numel() // block))


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@Kernel
def encode_kernel(  # type: ignore[no-untyped-def]
    a, noise, limits, tops, codes, scales, n, size, blocks: int, code_row, scale_row: int,
    BITS: tl.constexpr, L2: tl.constexpr, LEAVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = (1 << (BITS - 1)) - 1
    chunk, first, begin, limit = place(n, size, blocks, ROWS)
    at, inside = cells(size, limit, 1, ROWS, WIDTH)
    row = first + tl.arange(0, ROWS)
    exists = tl.arange(0, ROWS) * size < limit
    x = tl.load(a + begin + at, inside, 0.0)
    if tops is not None:
        most, top = tl.load(limits + row, exists, 0.0)[:, None], tl.load(tops + row, exists, 0.0)
        x = tl.clamp(x, -most, most)
    elif L2:
        top = tl.sqrt_rn(tl.sum(x * x, 1))
    else:  # as integers, magnitudes keep their order, and NaN is the largest
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, tl.full(top.shape, S, tl.float32))
    tl.store(scales + chunk * scale_row + row, scale, exists)
    level = tl.div_rn(x, tl.where(top == 0, 1.0, top)[:, None]) * S
    if noise is None:
        level = (level + 12582912.0) - 12582912.0  # 1.5 2^23: what is below one is rounded to nearest even
    else:
        level += tl.load(noise + begin + at, inside, 0).to(tl.float32) * 1.52587890625e-05
        level = tl.clamp(level + (S + 0.5 + 7.62939453125e-06), 0.0, 2.0 * S).to(tl.int32).to(tl.float32) - S
    if tops is None:
        mine = codes + chunk * code_row + first * (size * BITS // 8)
        write_codes(mine, tl.where(inside, level.to(tl.int32) + S, 0), size, limit, BITS, ROWS, WIDTH)
    else:
        tl.store(codes + begin + at, level.to(tl.int8), inside)
    if LEAVE:
        tl.store(a + begin + at, tl.fma(-level, tl.broadcast_to(scale[:, None], (ROWS, WIDTH)), x), inside)


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
    shared: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    codes, scales = made = _empty(a, bits, block, shared is not None) if out is None else out
    rows, tops = _rows(codes), _rows(scales)
    blocks = tops.shape[1]
    encode_kernel(
        programs_of(len(rows), blocks, block),
        a, noise, *(shared or (None, None)), codes, scales, a.numel(), block, blocks, rows.stride(0), tops.stride(0),
        BITS=bits, L2=norm == "l2", LEAVE=leave_error, **tile_of(block),
    )  # fmt: skip
    return made
