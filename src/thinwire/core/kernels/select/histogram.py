"""Radix selection: find the k-th magnitude digit by digit of its bit pattern.

Read as an integer, the bit pattern of |x| (31 bits of fp32) is monotone in |x|. A histogram of the first 11 bits shows
in which digit the k-th magnitude lies; the next 10 and the last 10 bits refine it. Three passes give it exactly, two
within 2^-13 of its size; then the band rule applies. Outliers do not matter, whereas they do to a bisection of values.

This follows no paper; it is the usual radix selection. fp64 has 63 bits and takes six passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.fused import fused
from thinwire.core.kernels.select.band import Band, check_window, draw, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number
from thinwire.core.kernels.select.ranked import LARGEST, Ranked

_DIGITS = {torch.float32: (11, 10, 10), torch.float64: (11, 11, 11, 10, 10, 10)}
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
_INFINITE = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}


def histogram(
    x: Tensor,
    k: int,
    generator: torch.Generator | None = None,
    *,
    passes: int | None = None,
    window: str = "circular",
) -> Tensor:
    """Return k indices, exact except among equal magnitudes, if all digits are looked at (``passes`` None)."""
    digits = _DIGITS[torch.float64 if x.dtype == torch.float64 else torch.float32]
    if passes is not None and not 1 <= passes <= len(digits):
        raise ValueError(f"passes={passes} must be in 1..{len(digits)}")
    check_window(window)
    return choose(x, k, draw(generator), passes, window)


def _choose(x: Tensor, k: int, u: Number, passes: int | None, window: str) -> Tensor:
    field = Magnitudes(x, k)
    return take(field, search(field, _DIGITS[field.dtype][:passes]), u, window)


def search(field: Magnitudes, digits: tuple[int, ...]) -> Band:
    """Return the interval of bit patterns that holds the k-th magnitude."""
    shift = sum(_DIGITS[field.dtype])
    prefix = torch.zeros((), dtype=torch.int64, device=field.x.device)
    left = prefix + field.k  # the k-th magnitude is the left-th of those with this prefix
    for bits in digits:
        counts = _count(field, prefix, shift, bits)
        shift -= bits
        reach = counts.flip(0).cumsum(0).flip(0)  # entries with this digit or a higher one
        digit = (reach >= left).sum() - 1
        left = left - (reach - counts).gather(0, digit.view(1)).squeeze(0)
        prefix = (prefix << bits) | digit
    band = Band(field, field.k)
    band.low, band.high = _edge(field, prefix, shift), _edge(field, prefix + 1, shift)
    band.low = field.rounded(band.low)  # at most the largest finite number, as which Inf and NaN count
    return band


def _edge(field: Magnitudes, prefix: Tensor, shift: int) -> Number:
    """Return the smallest magnitude with this prefix; Inf at most."""
    infinite = torch.full_like(prefix, _INFINITE[field.dtype])
    pattern = torch.minimum(torch.minimum(prefix, infinite >> shift) << shift, infinite)
    edge = pattern.to(_KEYS[field.dtype]).view(field.dtype)
    return float(edge) if field.host else edge.double()


def _count(field: Magnitudes, prefix: Tensor, shift: int, bits: int) -> Tensor:
    keys = _KEYS[field.dtype]
    if not field.host:
        (a,) = field.pieces()
        key, bins = a.view(keys), 1 << bits
        digit = torch.where((key >> shift) == prefix, (key >> (shift - bits)) & (bins - 1), bins)
        counts = torch.zeros(bins + 1, dtype=torch.int64, device=key.device)
        return counts.scatter_add_(0, digit.long(), torch.ones_like(digit, dtype=torch.int64))[:bins]
    first, low = shift == sum(_DIGITS[field.dtype]), _edge(field, prefix, shift)
    if not first:
        field.keep_from(low)
    counts = torch.zeros(1 << bits, dtype=torch.int64)
    for a in field.pieces(low):
        key = a.view(keys)
        if not first:
            key = key[(key >> shift) == prefix]
        counts += torch.bincount((key >> (shift - bits)) & ((1 << bits) - 1), minlength=1 << bits)
    return counts


@fused(_choose)
def choose(x: Tensor, k: int, u: Number, passes: int | None, window: str) -> Tensor:
    digits = _DIGITS[torch.float32]
    return Ranked(x, (k,)).take(k, u, window, shift=sum(digits) - sum(digits[:passes]), most=LARGEST)
