"""MSTopK: bisection of the threshold between the mean and the largest magnitude.

Paper: Shi et al.: Towards scalable distributed training of deep learning on public cloud clusters, MLSys 2021
(arXiv:2010.10458), algorithm 1: ``samplings`` counts, then the band rule.

Differences from the paper: if fewer than k entries reach the mean (one huge entry, or a density above about 0.4), the
search begins at 0, because otherwise no threshold below the mean could be tried and most of the choice would be random.
The window is circular. ``base="mean", window="line"`` is the rule as the paper prints it. The public CUDA kernels
search from the smallest magnitude (``base="min"``) and need no such repair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.select.band import Band, check_window, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number, pick

BASES = ("auto", "mean", "min", "zero")


def mstopk(
    x: Tensor,
    k: int,
    generator: torch.Generator | None = None,
    *,
    samplings: int = 30,
    base: str = "auto",
    window: str = "circular",
) -> Tensor:
    """Return k indices after at most ``samplings`` counts; 30 can resolve one outlier of 1e9 times the rest.

    The search begins at ``base``: "mean", "min", "zero", or "auto": the mean, or zero if fewer than k reach it.
    """
    if samplings < 1:
        raise ValueError(f"samplings={samplings} must be at least 1")
    if base not in BASES:
        raise ValueError(f"base={base!r} is unknown; use one of {', '.join(map(repr, BASES))}")
    check_window(window)
    field = Magnitudes(x, k)
    return take(field, search(field, samplings, base), generator, window)


def search(field: Magnitudes, samplings: int = 30, base: str = "auto") -> Band:
    """Return the band around the k-th magnitude after that many counts."""
    k, band = field.k, Band(field, field.k)
    mean, top = field.mean_and_top()
    bottom: Number = field.number(0.0)
    if base == "mean":
        bottom = mean
    elif base == "min":
        bottom = field.lowest()
    elif base == "auto":
        bottom = pick(field.count(mean) < k, bottom, mean)
    left, right = field.number(0.0), field.number(1.0)
    for _ in range(samplings):
        middle = (left + right) / 2
        t = field.rounded(bottom + middle * (top - bottom))
        c = field.count(t)
        band.tried(t, c)
        if field.host and c == k:
            break
        left, right = pick(c > k, middle, left), pick(c > k, right, middle)
    return band
