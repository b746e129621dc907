"""Gaussian-k: the threshold that a normal distribution of the same second moment would have.

Paper: Shi, Chu, Cheung, See: Understanding Top-k sparsification in distributed deep learning, 2019 (arXiv:1911.08772),
algorithm 1.

Differences from the paper: exactly k entries, by the band rule; the moment is taken about zero, because |x| is
compared; entries are counted again after every change; one more count gives the band its missing end.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.core.kernels.select.band import Band, check_window, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, pick

_LOW, _HIGH = 2 / 3, 4 / 3
_DOWN, _UP = 0.5, 1.5


def gaussian(
    x: Tensor, k: int, generator: torch.Generator | None = None, *, rounds: int = 3, window: str = "circular"
) -> Tensor:
    """Return k indices; a round halves the threshold if below 2k/3 entries reach it, or x1.5 if above 4k/3 do."""
    if rounds < 0:
        raise ValueError(f"rounds={rounds} must not be negative")
    check_window(window)
    field = Magnitudes(x, k)
    band = Band(field, k)
    t = field.rounded(field.rms() * -NormalDist().inv_cdf(k / field.size / 2))
    c = field.count(t)
    band.tried(t, c)
    for _ in range(rounds):
        if field.host and _LOW * k <= c <= _HIGH * k:
            break
        t = field.rounded(pick(c < _LOW * k, t * _DOWN, pick(c > _HIGH * k, t * _UP, t)))
        c = field.count(t)
        band.tried(t, c)
    t = field.rounded(pick(c <= k, t * _DOWN, t * _UP))
    band.tried(t, field.count(t))
    return take(field, band, generator, window)
