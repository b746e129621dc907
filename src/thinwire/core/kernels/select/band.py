"""The band rule: choose exactly k entries from the thresholds that were tried.

All entries of at least ``high`` are taken. The rest comes from the band [low, high): a *circular window* with a random
start over the band in index order, so that each of its entries is taken equally often. ``window="line"`` does not wrap,
as published with MSTopK (arXiv:2010.10458); it takes both ends of a tensor too rarely.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.core.kernels.select.magnitudes import Magnitudes, Number, magnitude, pick

WINDOWS = ("circular", "line")


class Band:
    """Bounds on the k-th magnitude: at most k entries reach ``high`` (first inf), more than k ``low`` (first 0)."""

    def __init__(self, field: Magnitudes, k: int) -> None:
        self.k = k
        self.high: Number = field.number(math.inf)
        self.low: Number = field.number(0.0)

    def tried(self, threshold: Number, count: Number) -> None:
        self.high = pick((count <= self.k) & (threshold < self.high), threshold, self.high)
        self.low = pick((count > self.k) & (threshold > self.low), threshold, self.low)


def check_window(window: str) -> None:
    if window not in WINDOWS:
        raise ValueError(f'window={window!r} is unknown; use "circular" or "line"')


def draw(generator: torch.Generator | None) -> Number:
    """Return a number in [0, 1), in fp64 on the generator's device; None: torch's default CPU generator."""
    device = "cpu" if generator is None else generator.device
    u = torch.rand((), dtype=torch.float64, generator=generator, device=device)
    return float(u) if u.device.type == "cpu" else u


def take(field: Magnitudes, band: Band, u: Number, window: str = "circular") -> Tensor:
    """Return indices (int64) of exactly ``band.k`` entries, by the band rule; on a GPU without a host read.

    The window begins where u in [0, 1), see ``draw``, says.
    """
    return _on_host(field, band, float(u), window) if field.host else _static(field, band, u, window)


def _on_host(field: Magnitudes, band: Band, u: float, window: str) -> Tensor:
    sure = field.indices(band.high)
    need = band.k - sure.numel()
    if not need:
        return sure
    if band.low > 0:
        reach = field.indices(band.low)
        inside = reach[magnitude(field.x[reach]) < band.high] if sure.numel() else reach
        n = inside.numel()
    else:  # the band is all other entries: no list of them is made
        n = field.size - sure.numel()
    circular = window == "circular"
    start = min(int(n * u), n - 1) if circular else min(int((n - need + 1) * u), n - need)
    places = torch.arange(start, start + need) % n
    return torch.cat([sure, inside[places] if band.low > 0 else _others(sure, places)])


def _others(taken: Tensor, places: Tensor) -> Tensor:
    """Return the indices at these places among all that are not ``taken`` (ascending)."""
    before = taken - torch.arange(taken.numel())  # how many other entries lie before each
    return places + torch.searchsorted(before, places, right=True)


def _static(field: Magnitudes, band: Band, u: Number, window: str) -> Tensor:
    (a,) = field.pieces()
    sure = a >= band.high
    inside = (a >= band.low) & ~sure
    place = inside.cumsum(0, dtype=torch.int32) - 1
    n, need = inside.sum(), band.k - sure.sum()
    if window == "circular":
        place = place - torch.minimum((n.double() * u).long(), n - 1)
        place = torch.where(place < 0, place + n, place)
    else:
        place = place - torch.minimum(((n - need + 1).double() * u).long(), n - need)
    chosen = sure | (inside & (place >= 0) & (place < need))
    return torch.nonzero_static(chosen, size=band.k).squeeze(1)
