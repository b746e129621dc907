"""Radix selection: find the k-th magnitude digit by digit of its bit pattern.

Read as an integer, the bit pattern of |x| (31 bits of fp32) is monotone in |x|. A histogram of the first 11 bits shows
in which digit the k-th magnitude lies; the next 10 and the last 10 bits refine it. Three passes give it exactly, two
within 2^-13 of its size; then the band rule applies. Outliers do not matter, whereas they do to a bisection of values.

This follows no paper; it is the usual radix selection. fp64 has 63 bits and takes six passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.select.band import Band, check_window, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number

if TYPE_CHECKING:
    import triton.language as tl

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
    field = Magnitudes(x, k)
    digits = _DIGITS[field.dtype]
    if passes is not None and not 1 <= passes <= len(digits):
        raise ValueError(f"passes={passes} must be in 1..{len(digits)}")
    check_window(window)
    return take(field, search(field, digits[:passes]), generator, window)


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
        return count_digits(a.view(keys), prefix, shift, bits)
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


def _count_digits(keys: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    """Count the digits, ``bits`` bits from bit ``shift``, of keys ``[d]`` whose upper bits are ``prefix``.

    It does without a host read.
    """
    bins = 1 << bits
    digit = torch.where((keys >> shift) == prefix, (keys >> (shift - bits)) & (bins - 1), bins)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, digit.long(), torch.ones_like(digit, dtype=torch.int64))[:bins]


BLOCK_ELEMENTS = 2048
BLOCK_TURNS = 8  # blocks that one program counts before it adds to memory


@Kernel
def digits_kernel(  # type: ignore[no-untyped-def]
    keys, prefix, counts, size, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
):
    BINS: tl.constexpr = 1 << BITS
    wanted = tl.load(prefix).to(tl.int32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    bins = tl.arange(0, 2 * BINS)
    found = tl.zeros((2 * BINS,), tl.int32)
    for turn in range(TURNS):
        at = first + turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        key = tl.load(keys + at, inside, 0)
        match = inside & (((key >> (SHIFT - 1)) >> 1) == wanted)  # in two steps: a shift by 32 would exceed the word
        digit = tl.where(match, (key >> (SHIFT - BITS)) & (BINS - 1), BINS)  # one more bin for all others
        found += tl.histogram(digit, 2 * BINS)
    tl.atomic_add(counts + bins, found.to(tl.int64), (bins < BINS) & (found > 0))


@fused(_count_digits)
def count_digits(keys: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    counts = torch.zeros(1 << bits, dtype=torch.int64, device=keys.device)
    programs = -(-keys.numel() // (BLOCK_ELEMENTS * BLOCK_TURNS))
    digits_kernel(
        programs, keys, prefix, counts, keys.numel(), SHIFT=shift, BITS=bits, BLOCK=BLOCK_ELEMENTS, TURNS=BLOCK_TURNS
    )
    return counts
