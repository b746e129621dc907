"""Take a threshold from a sample, then the largest of the entries that reach it.

Paper: Lin et al.: Deep gradient compression, ICLR 2018 (arXiv:1712.01887), section 3 and the public code's sampling:
the threshold of a 1 % sample; if too many entries reach it, top-k among them; if too few, a lower threshold.

Differences from the paper: the threshold is lowered (x0.8, or halfway to one that was too low) until k entries reach
it, and raised if more than 4k do, at most ``rounds`` times. Top-k then runs on at most 4k entries, chosen by the band
rule, so the result is exact unless the rounds run out.

Triton's kernels find the k-th magnitude itself (ranked.py): there the rounds never run out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.core.kernels.fused import fused
from thinwire.core.kernels.select.band import Band, draw, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number, magnitude, pick
from thinwire.core.kernels.select.ranked import LARGEST, Ranked

_STEP = 0.8
_ROOM = 4
_STRIDE = 32  # strides are 32j + 1: a row length, mostly a multiple of 32, would sample few columns


def threshold(
    x: Tensor, k: int, generator: torch.Generator | None = None, *, sample: float = 0.01, rounds: int = 10
) -> Tensor:
    """Return k indices: from a share ``sample``, at least 2 d / k entries, and at most ``rounds`` changes."""
    if not 0 < sample <= 1:
        raise ValueError(f"sample={sample} must be above 0 and at most 1")
    if rounds < 0:
        raise ValueError(f"rounds={rounds} must not be negative")
    return choose(x, k, draw(generator), draw(generator), draw(generator), sample, rounds)


def _choose(x: Tensor, k: int, first: Number, second: Number, third: Number, sample: float, rounds: int) -> Tensor:
    field = Magnitudes(x, k)
    room = min(field.size, _ROOM * k)
    band = Band(field, room)
    t = _sampled(field, sample, first)
    field.keep_from(t * _STEP)  # one pass serves this threshold and the next
    for turn in range(rounds + 1):
        c = field.count(t)
        band.tried(t, c)
        if turn == rounds or (field.host and k <= c <= room):
            break
        step, half = t * _STEP, (t + band.low) / 2
        lower = pick(step > half, step, half)
        step, half = t / _STEP, (t + band.high) / 2
        higher = pick(step < half, step, half)
        t = field.rounded(pick(c < k, lower, pick(c > room, higher, t)))
    if field.host and k <= c <= room:
        found = field.indices(t)
    else:
        above = _next(field, t)  # if many entries equal t, those above it come first
        band.tried(above, field.count(above))
        found = take(field, band, second).sort().values
    return found[_best(Magnitudes(x[found], k), third)]


@fused(_choose)
def choose(x: Tensor, k: int, first: Number, second: Number, third: Number, sample: float, rounds: int) -> Tensor:
    return Ranked(x, (k,)).take(k, third, "circular", most=LARGEST)


def _best(field: Magnitudes, u: Number) -> Tensor:
    kth = torch.topk(_clean(field, field.x), field.k, sorted=False).values.amin()
    band = Band(field, field.k)
    band.low = float(kth) if field.host else kth.double()
    band.high = _next(field, band.low)
    return take(field, band, u)


def _sampled(field: Magnitudes, share: float, u: Number) -> Number:
    wanted = min(field.size, max(math.ceil(share * field.size), math.ceil(2 * field.size / field.k)))
    stride = max(1, (field.size // wanted - 1) // _STRIDE * _STRIDE + 1)
    n = field.size // stride
    if isinstance(u, Tensor):
        sample = field.x[torch.arange(n, device=field.x.device) * stride + (u * stride).long()]
    else:
        sample = field.x[int(u * stride) :: stride][:n]
    sample = _clean(field, sample)
    t = torch.topk(sample, min(n, math.ceil(field.k / field.size * n)), sorted=False).values.amin()
    return float(t) if field.host else t.double()


def _clean(field: Magnitudes, x: Tensor) -> Tensor:
    return magnitude(x).nan_to_num(nan=field.largest, posinf=field.largest)


def _next(field: Magnitudes, t: Number) -> Number:
    here = t.to(field.dtype) if isinstance(t, Tensor) else torch.tensor(t, dtype=field.dtype)
    after = torch.nextafter(here, torch.full_like(here, math.inf))
    return float(after) if field.host else after.double()
