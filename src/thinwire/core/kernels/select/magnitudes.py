"""The magnitudes |x| of a vector: count and find entries above a threshold. Every search builds on this.

On a CPU a host read is cheap: results are Python numbers, x is read in cache-sized pieces and never copied, and once
only few entries are in question, only these are read again. On other devices results are 0-dim tensors, shapes do not
depend on values, and the same code of a search runs without a host read (``pick`` chooses).

Non-finite entries count as the largest finite number, so they are chosen before others and the caller sees them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Number = Any
"""A Python number (CPU) or a 0-dim tensor on the vector's device."""

PIECE = 1 << 18
FEW = 4  # entries in question are kept separately once they are at most a quarter of all


def on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def pick(condition: Number, yes: Number, no: Number) -> Number:
    """Return ``yes if condition else no``, also if the condition is a tensor."""
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def magnitude(x: Tensor) -> Tensor:
    """Return |x|, 16-bit floats as fp32."""
    return x.abs() if x.element_size() >= 4 else x.abs().float()


def at_least(x: Tensor, threshold: float, limit: int | None = None) -> Tensor | None:
    """Return indices where not |x| < threshold (NaN passes), ascending; CPU. None: there are more than ``limit``."""
    if threshold == math.inf:
        return torch.empty(0, dtype=torch.int64)
    hits, found = [], 0
    for i, piece in enumerate(torch.split(x, PIECE)):
        below = (magnitude(piece) < threshold).numpy()
        hits.append(np.flatnonzero(~below) + i * PIECE)
        found += len(hits[-1])
        if limit is not None and found > limit:
            return None
    return torch.from_numpy(np.concatenate(hits))


class Magnitudes:
    """Counts over |x| for thresholds; fp32 (fp64 for fp64)."""

    def __init__(self, x: Tensor, k: int) -> None:
        self.x, self.k, self.size = x, k, x.numel()
        self.host = on_host(x)
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.largest = torch.finfo(self.dtype).max
        self._few: Tensor | None = None  # CPU: indices of all entries of at least _floor
        self._few_values = x
        self._floor = math.inf
        if not self.host:
            self._few_values = magnitude(x).nan_to_num(nan=self.largest, posinf=self.largest)

    def number(self, value: float) -> Number:
        return value if self.host else torch.full((), value, dtype=torch.float64, device=self.x.device)

    def rounded(self, t: Number) -> Number:
        """Return a threshold as the comparison sees it: in the vector's dtype, at most its largest number."""
        if isinstance(t, Tensor):
            return t.clamp(max=self.largest).to(self.dtype).double()
        return float(torch.tensor(min(t, self.largest), dtype=self.dtype))

    def pieces(self, threshold: Number = 0.0) -> Iterator[Tensor]:
        """Yield magnitudes, at least those of entries that reach ``threshold``; CPU: NaN and Inf unchanged."""
        if not self.host:
            yield self._few_values
            return
        for piece in torch.split(self._few_values if threshold >= self._floor else self.x, PIECE):
            yield magnitude(piece)

    def count(self, threshold: Number) -> Number:
        if not self.host:
            return (self._few_values >= threshold).sum()
        if threshold == math.inf:
            return 0
        c = sum(a.numel() - int(torch.count_nonzero(a < threshold)) for a in self.pieces(threshold))
        if threshold < self._floor and self.k <= c <= self.size // FEW:
            self.keep_from(threshold)
        return c

    def keep_from(self, threshold: Number) -> None:
        """CPU: keep the entries of at least the threshold separately, if they are few; other devices: do nothing."""
        if not self.host or threshold >= self._floor:
            return
        few = at_least(self.x, threshold, self.size // FEW)
        if few is not None:
            self._few, self._few_values, self._floor = few, self.x[few], threshold

    def indices(self, threshold: float) -> Tensor:
        """CPU: return indices of the entries of at least the threshold, ascending."""
        found = at_least(self._few_values if threshold >= self._floor else self.x, threshold)
        assert found is not None  # no limit was set
        return self._few[found] if threshold >= self._floor and self._few is not None else found

    def mean_and_top(self) -> tuple[Number, Number]:
        if not self.host:
            a = self._few_values
            return a.mean(dtype=torch.float64), a.max().double()
        total, top = 0.0, 0.0
        for a in self.pieces():
            total, peak = total + float(a.sum(dtype=torch.float64)), float(a.max())
            top = self.largest if math.isnan(peak) else min(max(top, peak), self.largest)
        return total / self.size if math.isfinite(total) else self.largest, top

    def lowest(self) -> Number:
        found = torch.stack([a.nan_to_num(nan=self.largest, posinf=self.largest).amin() for a in self.pieces()])
        return float(found.amin()) if self.host else found.amin().double()

    def rms(self) -> Number:
        norms = [torch.linalg.vector_norm(a, dtype=torch.float64) for a in self.pieces()]
        rms = torch.linalg.vector_norm(torch.stack(norms)).nan_to_num(self.largest) / math.sqrt(self.size)
        return float(rms) if self.host else rms
