"""Quantisers: a 1-D tensor as packed codes of 1, 2, 4 or 8 bits and a few scales, and back.

Block codec: s = 2^(bits - 1) - 1 levels on either side of 0 (bits 2, 4, 8: 1, 7, 127). For a block v of elements, with
N = max|v| or |v|_2, a code is round(s v / N) + s, and stands for (code - s) N / s. Rounding is to nearest even or, with
noise, to one of the two neighbours so that the mean over draws is v. The last block of a tensor may be shorter. A block
with NaN or infinity has a scale that is not finite; its codes mean nothing.

Means codec, 2 bits: a block's unit u is its root mean square. Three bounds, -w u, 0 and w u, make four bins; a code
stands for the mean of what fell into its bin, in units. The means are sent with the codes. 1 bit: u is the mean of |v|,
and 0 the only bound.

Sign bits, for methods of one bit, are packed by eight into bytes.

On a CPU a piece of the tensor goes through all passes before the next one does: it stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Eight bools read as one int64 have element j in bit 8j; the product moves it to bit 56 + j, without carries.
_GATHER = sum(1 << (56 - 7 * j) for j in range(8))
_ROWS_AS = {8: torch.float64, 16: torch.complex128}  # by number of bytes
_PACKED_BYTES = 1 << 13  # of packed bits: 64 Ki elements, which stay in a CPU's cache


def pack_bits(mask: Tensor) -> Tensor:
    mask = mask.reshape(-1)
    n = mask.numel()
    if n % 8 or not mask.is_contiguous() or mask.storage_offset() % 8:
        padded = torch.zeros(n + -n % 8, dtype=torch.bool, device=mask.device)
        padded[:n] = mask
        mask = padded
    return ((mask.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def pack_signs(x: Tensor) -> Tensor:
    """Pack ``x >= 0`` into uint8 ``[ceil(n / 8)]``, low bits first."""
    x = x.reshape(-1)
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.cat([pack_bits(piece >= 0) for piece in torch.split(x, 8 * _packed_piece(x.device))])


def add_values(out: Tensor, bits: Tensor, high: Tensor, low: Tensor, owner: Tensor | None = None) -> None:
    """Add to ``out`` [n], for each row of ``bits`` [P, ceil(n / 8)], ``high[row]`` where set, else ``low[row]``.

    Rows are added in order, so the result does not depend on the device. With ``owner``, int32 [ceil(n / 8)], each
    byte's column of ``high`` and ``low``, these are [P, T].
    """
    if out.device.type == "meta":
        return
    # For every possible byte, the 8 values that it stands for.
    tables = torch.where(codes_of_bytes(1, out.device).bool(), high[..., None, None], low[..., None, None])
    tables, size = tables.view(len(bits), -1, 8), _packed_piece(bits.device)
    for start in range(0, bits.shape[1], size):
        piece = out[8 * start : 8 * (start + size)]
        first = None if owner is None else owner[start : start + size] * 256
        for table, row in zip(tables.unbind(), bits[:, start : start + size].unbind()):
            index = row.int() if first is None else first + row
            piece += look_up(table, index)[: piece.numel()]


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


def _packed_piece(device: torch.device) -> int:
    return _PACKED_BYTES if device.type == "cpu" else 1 << 40


BITS = (2, 4, 8)
_PIECE = 1 << 18  # number of elements: they stay in a CPU's cache, and calls cost little beside the work
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # to read that many codes, of one byte each, as one integer
_STEP = 2.0**-16  # step of the noise
_BOUND = 0.9957  # between two of four bins, in standard deviations, with least error for a Gaussian: Max, 1960


def levels(bits: int) -> int:
    """Return the number of levels on either side of zero: 1, 7 or 127."""
    return int(2 ** (bits - 1)) - 1


def packed_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


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
    wide = codes.view(_WIDE[per])
    packed = wide
    for j in range(1, per):
        packed = packed | (wide >> ((8 - bits) * j))
    return packed.to(torch.uint8)


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


def encode(
    a: Tensor, bits: int, block: int, norm: str = "max", noise: Tensor | None = None, *, leave_error: bool = False
) -> tuple[Tensor, Tensor]:
    """Return packed codes of ``a`` [n], uint8 ``[ceil(n bits / 8)]``, and scales N / s, ``[ceil(n / block)]``.

    ``block`` elements share a scale, with fewer than 8 bits a multiple of 8; N is their ``norm``, "max" or "l2". With
    ``noise``, int16 ``[n]`` uniform over all int16 (``seeding.noise``), codes are rounded at random, without bias up to
    2^-17 of a level; else to nearest even. ``leave_error`` takes from ``a`` what its (nearest) codes stand for.
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
        top = _largest(rows) if norm == "max" else torch.linalg.vector_norm(rows, dim=1)
        scale = torch.div(top, s, out=scales[start // block :][: len(rows)])
        level = rows.div(top.masked_fill(top == 0, 1)[:, None]).mul_(s)
        # NaN gets any code; its scale rejects the step. An int8 is what torch casts to fastest.
        if noise is None:
            made = level.round_().to(torch.int8).view(torch.uint8).add_(s)
        else:
            made = _rounded_at_random(level, s, noise[start : start + count])
        if leave_error:
            rows.addcmul_(level, scale[:, None], value=-1)
            if count % block:
                x.copy_(rows.view(-1)[:count])
        first = start * bits // 8
        codes[first : first + packed_bytes(count, bits)] = pack_codes(made.view(-1)[:count], bits)
    return codes, scales


def encode_means(a: Tensor, bits: int, block: int, parts: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of 1 or 2 bits, uint8 ``[n bits / 8]``, scales ``[n / block]`` and means ``[parts, 2^bits]``.

    The means, in units of scales, have the least squared error that these bins allow, so the decoded vector is never
    longer than ``a`` [n]. ``block`` is a multiple of 8; each of the equal ``parts``, of whole blocks, has own means.
    """
    n, size, bins = a.numel(), _piece(block, a.device), 2**bits
    codes = torch.empty(packed_bytes(n, bits), dtype=torch.uint8, device=a.device)
    scales, means = a.new_empty(n // block), a.new_empty(parts, bins)
    if a.device.type == "meta":
        return codes, scales, means
    bound = _BOUND if bits == 2 else 1.0
    found = a.new_empty(2, bins, n // block)  # sums and counts of each bin of each block
    for start in range(0, n, size):
        rows = a[start : start + size].view(-1, block)
        here = slice(start // block, start // block + len(rows))
        unit = torch.linalg.vector_norm(rows, bits, dim=1).div_(block ** (1 / bits))
        scales[here] = unit
        y = rows.div(unit.masked_fill(unit == 0, 1).mul_(bound)[:, None])
        made, found[:, :, here] = _four_bins(y) if bits == 2 else _two_bins(y)
        first = start * bits // 8
        codes[first : first + rows.numel() * bits // 8] = pack_codes(made.view(-1), bits)
    weights = scales.double().square().view(parts, -1)
    sums, counts = (found.view(2, bins, parts, -1) * weights).sum(-1)
    means.copy_((sums / counts.masked_fill_(counts == 0, 1)).mul_(bound).T)
    return codes, scales, means


def decode_sum(
    out: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, means: Tensor | None = None
) -> Tensor:
    """Fill ``out`` [n] with the sum of the decoded rows of codes [P, bytes] and scales [P, blocks], in their order.

    ``means``: for each row, and each of its equal parts: ``[P, parts, 2^bits]``; None: the block codec.
    """
    if out.device.type == "meta":
        return out
    n, s, size = out.numel(), levels(bits), _piece(block, out.device)
    if means is not None:
        parts = means.shape[1]
        held = codes_of_bytes(bits, out.device)  # for every byte, the numbers that it stands for
        tables = [row[:, held].view(-1, 8 // bits) for row in means.unbind()]
        begins = torch.arange(0, 256 * parts, 256, dtype=torch.int32, device=out.device)
        owners = begins[:, None].expand(parts, codes.shape[1] // parts).reshape(-1)  # where each byte's table begins
    for start in range(0, n, size):
        part = out[start : start + size]
        count = part.numel()
        full = count // block * block
        here = slice(start * bits // 8, packed_bytes(start + count, bits))
        if means is None:
            signed = unpack_codes(codes[:, here], count, bits).sub(s).view(torch.int8)  # bytes wrap around
        for i, scale in enumerate(scales[:, start // block :].unbind()):
            level = signed[i] if means is None else look_up(tables[i], owners[here] + codes[i, here])[:count]
            for to, of, by in (
                (part[:full].view(-1, block), level[:full].view(-1, block), scale[: full // block, None]),
                (part[full:], level[full:], scale[full // block : full // block + 1]),
            ):
                if i and to.numel():
                    to.addcmul_(of.to(out.dtype), by)
                elif to.numel():
                    torch.mul(of, by, out=to)
    return out


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

    ``own`` and ``shared`` are 0-dim, or ``[rows]`` of a matrix; ``noise`` as for :func:`encode`.
    """
    codes = torch.empty(a.numel(), dtype=torch.int8, device=a.device)
    if a.device.type == "meta":
        return codes
    width = a.numel() // own.numel()
    size = _piece(width, a.device)
    pieces = [torch.split(t, size) for t in (a, noise, codes)]
    tops = [torch.split(t.view(-1, 1), size // width) for t in (own, shared)]
    for x, part, out, most, top in zip(*pieces, *tops):
        level = torch.clamp(x.view(-1, width), -most, most).div_(top.masked_fill(top == 0, 1))
        out.copy_(_rounded_at_random(level, 1, part).view(-1)).sub_(1)
    return codes


def _largest(rows: Tensor) -> Tensor:
    """Return max|x| of each row, in one pass less than by ``abs``."""
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def _rounded_at_random(level: Tensor, s: int, noise: Tensor) -> Tensor:
    """Return uint8 codes 0 .. 2 s of levels, which are edited: the floor of level + u, with u in (0, 1)."""
    level.view(-1)[: noise.numel()].add_(noise, alpha=_STEP)
    level.add_(s + 0.5 + _STEP / 2).clamp_(0, 2 * s)  # not negative, so that the cast is the floor
    return level.to(torch.int16).to(torch.uint8)


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


def _piece(block: int, device: torch.device) -> int:
    size = _PIECE if device.type == "cpu" else 1 << 40
    return block * max(1, size // block)
