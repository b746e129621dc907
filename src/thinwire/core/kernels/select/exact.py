"""Exact selection: ``torch.topk`` of the magnitudes; on a CPU, only of those that can be among the k largest.

CPU: a strided sample gives a threshold that a little more than k elements pass. One pass in cache-sized pieces finds
these elements, and topk runs on them. If fewer than k pass, topk runs on everything, so the result is always exact.

A GPU finds the key of the k-th magnitude (ranked.py), and takes the first among equals, in index order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.core.kernels.fused import fused
from thinwire.core.kernels.select.magnitudes import at_least, magnitude
from thinwire.core.kernels.select.ranked import NAN, Ranked

_SMALL = 1 << 16
_SAMPLES = 1 << 15


def exact(x: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Return indices of the k largest |x|; NaN counts as the largest. ``generator`` is not used."""
    return choose(x, k)


def _choose(x: Tensor, k: int) -> Tensor:
    if x.device.type == "cpu" and x.numel() >= _SMALL and 0 < k <= x.numel() // 8:
        found = at_least(x, _threshold(x, k), limit=x.numel() // 2)
        if found is not None and found.numel() >= k:
            return found[_largest(x[found], k)]
    found = _largest(x, k)
    return found if x.device.type == "cpu" else found.sort().values


@fused(_choose)
def choose(x: Tensor, k: int) -> Tensor:
    return Ranked(x, (k,)).take(k, 0.0, "circular", most=NAN)


def _largest(x: Tensor, k: int) -> Tensor:
    return torch.topk(magnitude(x), k, sorted=False).indices


def _threshold(x: Tensor, k: int) -> float:
    """Return a magnitude that k elements very likely reach: four standard deviations below the sample's estimate."""
    stride = (x.numel() // _SAMPLES) | 1  # odd: a power-of-two row length would sample few columns
    sample = magnitude(x[::stride])
    expected = k / x.numel() * sample.numel()
    place = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    return float(torch.topk(sample, place, sorted=False).values.amin())
