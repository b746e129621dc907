"""A threshold kept from step to step, with a controller: one pass over the vector, messages of one size.

Paper: Li, Hoefler: Near-optimal sparse allreduce for distributed deep learning, PPoPP 2022 (arXiv:2201.07598; Ok-Topk),
which evaluates thresholds anew every 32 steps only.

Every entry of at least the threshold is sent, up to a capacity of ceil(1.25 k) pairs; pads are (0.0, -1). Where more
entries qualify, a circular window of them is sent and the rest stays behind. Between exact steps the threshold is
raised by 1.2 % where more than 5k/4 entries qualified and lowered by as much where fewer than 2k/3 did.

Differences from the paper: it keeps the threshold unchanged between exact steps and sends what qualifies, so that its
messages vary in length.

These are pure functions: the method keeps the threshold, a 0-dim tensor, in its state. A pad needs care: clamp the
indices to 0 before an ``index_add_``, which then adds 0 there; never assign through them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.select.band import draw
from thinwire.kernels.select.exact import exact
from thinwire.kernels.select.magnitudes import at_least, magnitude, on_host


@dataclass(frozen=True)
class Controller:
    """When and how the threshold changes.

    Args:
        factor: the threshold is multiplied or divided by it.
        low, high: shares of k; counts outside of them change the threshold.
        every: steps from one exact selection to the next.
    """

    factor: float = 1.012
    low: float = 2 / 3
    high: float = 5 / 4
    every: int = 32

    def capacity(self, d: int, k: int) -> int:
        """Pairs of one message: ceil(1.25 k), d at most."""
        return min(d, math.ceil(self.high * k))

    def exact_step(self, step: int) -> bool:
        """Whether the threshold is found anew at this step; known on the host."""
        return step % self.every == 0

    def next(self, threshold: Tensor, count: Tensor, k: int) -> Tensor:
        """The next step's threshold (0-dim), by how many entries reached this one's (0-dim)."""
        lower = torch.where(count < self.low * k, threshold / self.factor, threshold)
        return torch.where(count > self.high * k, threshold * self.factor, lower)


def find(x: Tensor, k: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """An exact step.

    Args:
        x: 1-D, d elements.
        k: 1..d.
        capacity: of the message, at least k.

    Returns:
        values and indices ``[capacity]``, padded with (0.0, -1); the threshold, 0-dim: the k-th magnitude.
    """
    if x.is_meta:
        return x.new_empty(capacity), x.new_empty(capacity, dtype=torch.int64), x.new_empty(())
    chosen = exact(x, k)
    values, indices = _padded(x, chosen, capacity)
    return values, indices, magnitude(x[chosen]).amin()


def reuse(
    x: Tensor, threshold: Tensor, capacity: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of at least the threshold.

    Args:
        x: 1-D, d elements.
        threshold: 0-dim, on x's device.
        capacity: of the message, at most d.
        generator: for the window, which is used only where more entries qualify.

    Returns:
        values and indices ``[capacity]``, padded with (0.0, -1); the count, 0-dim int64: how many qualified. If any of
        them is not finite, all values are NaN.
    """
    if x.is_meta:
        return x.new_empty(capacity), x.new_empty(capacity, dtype=torch.int64), x.new_empty((), dtype=torch.int64)
    u = draw(generator)
    if on_host(x):
        hits = at_least(x, float(threshold))
        assert hits is not None  # no limit was set
        n = hits.numel()
        window = hits
        if n > capacity:
            start = min(int(n * u), n - 1)
            window = torch.cat([hits[start : start + capacity], hits[: max(0, start + capacity - n)]])
        values, indices = _padded(x, window, capacity)
        clean = x[hits].isfinite().all()
        return torch.where(clean, values, torch.nan), indices, torch.tensor(n)
    hit = ~(magnitude(x) < threshold)
    count = hit.sum()
    place = hit.cumsum(0, dtype=torch.int32) - 1 - window_start(count, capacity, u)
    place = torch.where(place < 0, place + count, place)
    indices = torch.nonzero_static(hit & (place < capacity), size=capacity, fill_value=-1).squeeze(1)
    values = torch.where(indices >= 0, x[indices.clamp(min=0)], 0.0)
    clean = (x.isfinite() | ~hit).all()
    return torch.where(clean, values, torch.nan), indices, count


def window_start(count: Tensor, capacity: int, u: float | Tensor) -> Tensor:
    """The first entry of the window among ``count`` that qualified: 0 where all of them fit."""
    start = torch.minimum((count.double() * u).long(), count - 1)
    return torch.where(count > capacity, start, 0)


def _padded(x: Tensor, chosen: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    values, indices = x.new_zeros(capacity), chosen.new_full((capacity,), -1)
    values[: chosen.numel()], indices[: chosen.numel()] = x[chosen], chosen
    return values, indices
