"""Exact selection: ``torch.topk`` of the magnitudes, on a CPU of the few that can be among the k largest.

CPU: a strided sample gives a threshold that a little more than k elements pass; one pass in cache-sized pieces finds
them, and topk runs on those. If fewer than k pass, topk runs on everything, so the result is exact in any case.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 16
_PIECE = 1 << 18
_SAMPLES = 1 << 15


def exact(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest |x|; NaN counts as the largest."""
    if x.device.type == "cpu" and x.numel() >= _SMALL and 0 < k <= x.numel() // 8:
        found = _candidates(x, _threshold(x, k))
        if k <= found.numel() <= x.numel() // 2:
            return found[_largest(x[found], k)]
    return _largest(x, k)


def _largest(x: Tensor, k: int) -> Tensor:
    return torch.topk(_magnitude(x), k, sorted=False).indices


def _magnitude(x: Tensor) -> Tensor:
    return x.abs() if x.element_size() >= 4 else x.abs().float()


def _threshold(x: Tensor, k: int) -> float:
    """A magnitude that k elements reach, but for bad luck: four standard deviations below the sample's estimate."""
    stride = (x.numel() // _SAMPLES) | 1  # odd: a power-of-two row length would sample few columns
    sample = _magnitude(x[::stride])
    expected = k / x.numel() * sample.numel()
    place = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    return float(torch.topk(sample, place, sorted=False).values.amin())


def _candidates(x: Tensor, threshold: float) -> Tensor:
    """Indices where not |x| < threshold (so NaN passes)."""
    hits = []
    for i, piece in enumerate(torch.split(x, _PIECE)):
        below = (_magnitude(piece) < threshold).numpy()
        hits.append(np.flatnonzero(~below) + i * _PIECE)
    return torch.from_numpy(np.concatenate(hits))
