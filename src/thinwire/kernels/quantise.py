"""Quantisers: a 1-D tensor as small integer codes and a few scales, and back.

Block codec: s = 2^(bits - 1) - 1 levels on either side of 0 (bits 2, 4, 8: 1, 7, 127). For a block v of elements, with
N = max|v| or |v|_2, a code is round(s v / N) + s, and stands for (code - s) N / s. Rounding is to nearest even or, with
noise, to one of the two neighbours so that the mean over draws is v. The last block of a tensor may be shorter. A block
with NaN or infinity has a scale that is not finite; its codes mean nothing.

Means codec, 2 or 4 bits: a block's unit is its root mean square; 2^bits bins of equal width lie around 0; a code stands
for the mean of what fell into its bin. The means are sent with the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.bits import codes_of_bytes, look_up

BITS = (2, 4, 8)
_PIECE = 1 << 16  # number of elements that stay in a CPU's cache
_WIDE = {2: torch.int16, 4: torch.int32}  # to read that many codes, of one byte each, as one integer
_STEP = 2.0**-16  # step of the noise
_WIDTHS = {2: 0.9957, 4: 0.3352}  # width of bins, in standard deviations, with least error for a Gaussian: Max, 1960


def levels(bits: int) -> int:
    """Return the number of levels on either side of zero.

    Example:
        >>> [levels(bits) for bits in BITS]
        [1, 7, 127]
    """
    return int(2 ** (bits - 1)) - 1


def packed_bytes(n: int, bits: int) -> int:
    """Return the number of bytes of ``n`` packed codes."""
    return -(-n * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[n]`` below 2^bits into uint8 ``[ceil(n bits / 8)]``: low bits first, padded with 0.

    Example:
        >>> pack_codes(torch.tensor([1, 2, 3], dtype=torch.uint8), 4)
        tensor([33,  3], dtype=torch.uint8)
    """
    per = 8 // bits
    if per == 1:
        return codes
    n = codes.numel()
    if n % per or codes.storage_offset() % per or not codes.is_contiguous():
        padded = codes.new_zeros(n + -n % per)
        padded[:n] = codes
        codes = padded
    wide = codes.view(_WIDE[per])
    packed = wide
    for j in range(1, per):
        packed = packed | (wide >> ((8 - bits) * j))
    return packed.to(torch.uint8)


def unpack_codes(packed: Tensor, n: int, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the first ``n`` codes of ``packed``, as a new tensor of ``dtype``."""
    per = 8 // bits
    out = torch.empty(packed.numel(), per, dtype=dtype, device=packed.device)
    for j in range(per):
        out[:, j] = (packed >> (bits * j)) & (2**bits - 1)
    return out.view(-1)[:n]


def encode(a: Tensor, bits: int, block: int, norm: str = "max", noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a 1-D tensor.

    Args:
        a: ``[n]``, fp32 or fp64; not edited.
        bits: 2, 4 or 8.
        block: number of elements that share a scale; with fewer than 8 bits a multiple of 8.
        norm: "max" or "l2".
        noise: int16 ``[n]``, uniform over all int16 (``seeding.noise``): round at random, without bias up to 2^-17 of
            a level. None: round to nearest even.

    Returns:
        Packed codes, uint8 ``[ceil(n bits / 8)]``, and the scales N / s, ``[ceil(n / block)]`` in the dtype of ``a``.
    """
    n, s = a.numel(), levels(bits)
    codes = torch.empty(packed_bytes(n, bits), dtype=torch.uint8, device=a.device)
    scales = a.new_empty(-(-n // block))
    if a.device.type == "meta":
        return codes, scales
    size = _piece(block, a.device)
    for start in range(0, n, size):
        x = a[start : start + size]
        count = x.numel()
        rows = torch.nn.functional.pad(x, (0, -count % block)).view(-1, block) if count % block else x.view(-1, block)
        top = rows.abs().amax(1) if norm == "max" else torch.linalg.vector_norm(rows, dim=1)
        torch.div(top, s, out=scales[start // block :][: len(rows)])
        part = None if noise is None else noise[start : start + count]
        made = _codes(rows, top[:, None], s, part)
        first = start * bits // 8
        codes[first : first + packed_bytes(count, bits)] = pack_codes(made.view(-1)[:count], bits)
    return codes, scales


def encode_means(a: Tensor, bits: int, block: int, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and means of a 1-D tensor.

    The means have the least squared error that these bins allow, so the decoded vector is never longer than ``a``.

    Args:
        a: ``[n]``, fp32 or fp64; not edited.
        bits: 2 or 4.
        block: number of elements that share a scale, a multiple of 8.
        parts: number of equal parts, of whole blocks, that have their own means.

    Returns:
        Packed codes, uint8 ``[n bits / 8]``; scales ``[n / block]``; means ``[parts, 2^bits]`` in units of the scales.
    """
    n, count = a.numel(), 2**bits
    codes = torch.empty(packed_bytes(n, bits), dtype=torch.uint8, device=a.device)
    scales, means = a.new_empty(n // block), a.new_empty(parts, count)
    if a.device.type == "meta":
        return codes, scales, means
    size = _piece(block, a.device)
    rows_of_part = n // block // parts
    products, squares = torch.zeros(2, parts * count, dtype=torch.float64, device=a.device)
    for start in range(0, n, size):
        rows = a[start : start + size].view(-1, block)
        unit = torch.linalg.vector_norm(rows, dim=1, keepdim=True).div_(block**0.5)
        first = start // block
        scales[first : first + len(rows)] = unit[:, 0]
        bins = rows.div(unit.masked_fill(unit == 0, 1).mul_(_WIDTHS[bits])).floor_().add_(count // 2)
        made = bins.clamp_(0, count - 1).to(torch.int8).view(torch.uint8)
        part = torch.arange(first, first + len(rows), device=a.device) // rows_of_part * count
        place = (made + part[:, None]).view(-1)
        products += torch.bincount(place, (rows * unit).view(-1), parts * count)
        squares += torch.bincount(place, unit.square().expand_as(rows).reshape(-1), parts * count)
        codes[start * bits // 8 :][: rows.numel() * bits // 8] = pack_codes(made.view(-1), bits)
    means.copy_((products / squares.masked_fill_(squares == 0, 1)).view(parts, count))
    return codes, scales, means


def add_decoded(out: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, means: Tensor | None = None) -> None:
    """Add to ``out`` [n] the decoded rows of codes [P, bytes] and scales [P, blocks], in order of the rows.

    ``means``: for each row, and each of its equal parts: ``[P, parts, 2^bits]``; None: the block codec.
    """
    if out.device.type == "meta":
        return
    n, s, size = out.numel(), levels(bits), _piece(block, out.device)
    tables: Sequence[Tensor | None] = [None] * len(codes)
    if bits < 8:
        held = codes_of_bytes(bits, out.device)  # [256, 8 / bits]
        tables = (
            [held.to(out.dtype).sub_(s)] * len(codes)
            if means is None
            else [row[:, held].view(-1, 8 // bits) for row in means.unbind()]
        )
    parts = 1 if means is None else means.shape[1]
    for start in range(0, n, size):
        part = out[start : start + size]
        count = part.numel()
        full = count // block * block
        first, end = start * bits // 8, packed_bytes(start + count, bits)
        owner = None
        if parts > 1:
            owner = torch.arange(first, end, dtype=torch.int32, device=out.device) // (codes.shape[1] // parts) * 256
        for row, scale, table in zip(codes.unbind(), scales.unbind(), tables):
            if table is None:
                level = row[first:end].to(out.dtype).sub_(s)
            else:
                index = row[first:end].int()
                level = look_up(table, index if owner is None else index.add_(owner))
            level = level[:count]
            here = scale[start // block :]
            part[:full].view(-1, block).addcmul_(level[:full].view(-1, block), here[: full // block, None])
            if full < count:
                part[full:].addcmul_(level[full:], here[full // block])


def magnitudes(tensors: Sequence[Tensor], clip: float | None) -> Tensor:
    """Return max|a| of each tensor, at most ``clip`` times its root mean square; NaN or infinite if any element is."""
    if tensors[0].device.type == "meta":
        return tensors[0].new_empty(len(tensors))
    low, high = (torch.stack(ends) for ends in zip(*map(torch.aminmax, tensors)))
    top = torch.maximum(-low, high)
    if clip is None:
        return top
    factors = [clip / a.numel() ** 0.5 for a in tensors]
    limit = torch.stack(torch._foreach_mul(torch._foreach_norm([*tensors]), factors))
    return torch.where(limit > 0, torch.minimum(top, limit), top)  # no limit if all squares underflow to 0


def ternary(a: Tensor, own: Tensor, shared: Tensor, noise: Tensor) -> Tensor:
    """Clamp ``a`` to +-``own``; return int8 codes -1, 0, 1 whose mean over draws is a / ``shared``.

    Args:
        a: ``[n]``; not edited.
        own, shared: 0-dim; or ``[rows]``, if ``a`` is a matrix with that many rows.
        noise: as for :func:`encode`.
    """
    codes = torch.empty(a.numel(), dtype=torch.int8, device=a.device)
    if a.device.type == "meta":
        return codes
    width = a.numel() // own.numel()
    size = _piece(width, a.device)
    pieces = [torch.split(t, size) for t in (a, noise, codes)]
    tops = [torch.split(t.view(-1, 1), size // width) for t in (own, shared)]
    for x, part, out, most, top in zip(*pieces, *tops):
        x = torch.clamp(x.view(-1, width), -most, most)
        out.copy_(_codes(x, top, 1, part).view(-1)).sub_(1)
    return codes


def _codes(x: Tensor, top: Tensor, s: int, noise: Tensor | None) -> Tensor:
    """Return uint8 codes 0 .. 2 s of ``x`` within +-``top``. NaN gets any code; its scale rejects the step."""
    x = x.div(top.masked_fill(top == 0, 1)).mul_(s)
    if noise is None:  # int8 is what torch casts to fastest
        return x.round_().clamp_(-s, s).to(torch.int8).view(torch.uint8).add_(s)
    # The floor of x + u with u in (0, 1): the cast truncates, and x + s is not negative.
    x.view(-1)[: noise.numel()].add_(noise, alpha=_STEP)
    x.add_(s + 0.5 + _STEP / 2).clamp_(0, 2 * s)
    return x.to(torch.int16).to(torch.uint8)


def _piece(block: int, device: torch.device) -> int:
    size = _PIECE if device.type == "cpu" else 1 << 40
    return block * max(1, size // block)
