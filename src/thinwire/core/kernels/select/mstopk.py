"""MSTopK: bisection of the threshold between the mean and the largest magnitude.

Paper: Shi et al.: Towards scalable distributed training of deep learning on public cloud clusters, MLSys 2021
(arXiv:2010.10458), algorithm 1: ``samplings`` counts, then the band rule.

Differences from the paper: if fewer than k entries reach the mean (one huge entry, or a density above about 0.4), the
search begins at 0, because otherwise no threshold below the mean could be tried and most of the choice would be random.
The window is circular. ``base="mean", window="line"`` is the rule as the paper prints it. The public CUDA kernels
search from the smallest magnitude (``base="min"``) and need no such repair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.select.band import Band, check_window, draw, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number, pick
from thinwire.core.kernels.select.ranked import (
    HIGH,
    LEAST,
    LOW,
    TILES,
    TOP,
    Ranked,
    first_band,
    rank_key,
    rounded_key,
    size_of,
)

if TYPE_CHECKING:
    import triton.language as tl

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
    return choose(x, k, draw(generator), samplings, base, window)


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


def _choose(x: Tensor, k: int, u: Number, samplings: int, base: str, window: str) -> Tensor:
    field = Magnitudes(x, k)
    return take(field, search(field, samplings, base), u, window)


@Kernel
def bisect_kernel(  # type: ignore[no-untyped-def]
    state, sums, programs: int, size: int, SAMPLINGS: tl.constexpr, BASE: tl.constexpr, TILED: tl.constexpr
):
    """``search`` in one program, from the keys of ranks k + 1 and k."""
    tiles = tl.arange(0, TILED)
    mean = tl.sum(tl.load(sums + tiles, tiles < programs, 0.0)) / size
    beyond, _ = rank_key(state, 0, 4, 2)
    kth, _ = rank_key(state, 1, 4, 2)
    top, bottom = size_of(tl.load(state + TOP)), mean * 0
    if BASE == 0:
        bottom = tl.where(rounded_key(mean) > kth, bottom, mean)
    elif BASE == 1:
        bottom = mean
    elif BASE == 2:
        bottom = size_of(tl.load(state + LEAST))
    left, right = mean * 0, mean * 0 + 1
    low, high = first_band(beyond)
    for _ in range(SAMPLINGS):
        middle = (left + right) / 2
        t = rounded_key(bottom + middle * (top - bottom))
        more = t <= beyond
        low = tl.where(more, tl.maximum(low, t), low)
        high = tl.where(more, high, tl.minimum(high, t))
        left, right = tl.where(more, middle, left), tl.where(more, right, middle)
    tl.store(state + LOW, low)
    tl.store(state + HIGH, high)


@fused(_choose)
def choose(x: Tensor, k: int, u: Number, samplings: int, base: str, window: str) -> Tensor:
    if k == x.numel():
        return torch.arange(k, device=x.device)
    found = Ranked(x, (k + 1, k), moment=1)
    bisect_kernel(
        1, found.state, found.sums, found.programs, found.size,
        SAMPLINGS=samplings, BASE=BASES.index(base), TILED=TILES, enable_fp_fusion=False,
    )  # fmt: skip
    return found.take(k, u, window)
