"""Selection in few passes: accumulate + compare + compact, and the histogram of a radix selection.

Twins: ``torch.add`` followed by ``kernels.select.reuse.reuse``, and ``kernels.select.histogram.digits``. The results
are equal bit for bit, the pairs of a message up to their order. No host read, no atomic that decides an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.select.band import draw
from thinwire.kernels.select.reuse import window_start

_BLOCK = 2048
_TURNS = 8  # blocks that one program of the histogram counts before it adds to memory


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _accumulate(residual, gradient, out, threshold, counts, unclean, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a = tl.load(residual + at, inside, 0.0) + tl.load(gradient + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, a, inside)
    hit = inside & ((tl.abs(a) >= tl.load(threshold)) | (a != a))
    tl.store(counts + pid, tl.sum(hit.to(tl.int32), 0))
    bad = hit & ((a != a) | (tl.abs(a) == float("inf")))
    tl.store(unclean + pid, tl.sum(bad.to(tl.int32), 0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _compact(  # type: ignore[no-untyped-def]
    a, threshold, before, total, start, values, indices, size, capacity, BLOCK: tl.constexpr
):
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(a + at, inside, 0.0)
    hit = inside & ((tl.abs(x) >= tl.load(threshold)) | (x != x))
    place = tl.load(before + pid) + tl.cumsum(hit.to(tl.int64), 0) - 1 - tl.load(start)
    place = tl.where(place < 0, place + tl.load(total), place)
    keep = hit & (place < capacity)
    tl.store(values + place, x, keep)
    tl.store(indices + place, at, keep)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _digits(  # type: ignore[no-untyped-def]
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
        match = inside & (((key >> (SHIFT - 1)) >> 1) == wanted)  # in two steps: 31 + 1 would be past the word
        digit = tl.where(match, (key >> (SHIFT - BITS)) & (BINS - 1), BINS)  # a bin more for all others
        found += tl.histogram(digit, 2 * BINS)
    tl.atomic_add(counts + bins, found.to(tl.int64), (bins < BINS) & (found > 0))


def accumulate_select(
    residual: Tensor,
    gradient: Tensor,
    threshold: Tensor,
    capacity: int,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A = residual + gradient, and the entries of A of at least the threshold, in two passes over memory.

    Args:
        residual: fp32 ``[d]``, contiguous.
        gradient: ``[d]``, contiguous, any float dtype.
        threshold: fp32, 0-dim.
        capacity: of the message, at most d.
        generator: for the window.
        out: memory for A, fp32 ``[d]``.

    Returns:
        A; values and indices ``[capacity]`` (int64), padded with (0.0, -1); the count, 0-dim int64. If an entry that
        qualifies is not finite, all values are NaN.
    """
    d, device = residual.numel(), residual.device
    a = torch.empty_like(residual) if out is None else out
    blocks = triton.cdiv(d, _BLOCK)
    counts, unclean = torch.empty(2, blocks, dtype=torch.int32, device=device).unbind()
    _accumulate[(blocks,)](residual, gradient, a, threshold, counts, unclean, d, BLOCK=_BLOCK)
    reach = counts.cumsum(0, dtype=torch.int64)
    total = reach[-1]
    start = window_start(total, capacity, draw(generator))
    values = torch.zeros(capacity, dtype=a.dtype, device=device)
    indices = torch.full((capacity,), -1, dtype=torch.int64, device=device)
    _compact[(blocks,)](a, threshold, reach - counts, total, start, values, indices, d, capacity, BLOCK=_BLOCK)
    return a, torch.where(unclean.any(), torch.nan, values), indices, total


def digits(keys: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    """Twin of ``kernels.select.histogram.digits`` for int32 keys, contiguous."""
    counts = torch.zeros(1 << bits, dtype=torch.int64, device=keys.device)
    grid = (triton.cdiv(keys.numel(), _BLOCK * _TURNS),)
    _digits[grid](keys, prefix, counts, keys.numel(), SHIFT=shift, BITS=bits, BLOCK=_BLOCK, TURNS=_TURNS)
    return counts
