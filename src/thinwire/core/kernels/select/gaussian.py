"""Gaussian-k: the threshold that a normal distribution of the same second moment would have.

Paper: Shi, Chu, Cheung, See: Understanding Top-k sparsification in distributed deep learning, 2019 (arXiv:1911.08772),
algorithm 1.

Differences from the paper: exactly k entries, by the band rule; the moment is taken about zero, because |x| is
compared; entries are counted again after every change; one more count gives the band its missing end.
"""

from __future__ import annotations

import math
import struct
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.select.band import Band, check_window, draw, take
from thinwire.core.kernels.select.magnitudes import Magnitudes, Number, pick
from thinwire.core.kernels.select.ranked import (
    HIGH,
    LOW,
    TILES,
    Ranked,
    first_band,
    rank_key,
    rounded_key,
    size_of,
)

if TYPE_CHECKING:
    import triton.language as tl

_LOW, _HIGH = 2 / 3, 4 / 3
_DOWN, _UP = 0.5, 1.5


def gaussian(
    x: Tensor, k: int, generator: torch.Generator | None = None, *, rounds: int = 3, window: str = "circular"
) -> Tensor:
    """Return k indices; a round halves the threshold if below 2k/3 entries reach it, or x1.5 if above 4k/3 do."""
    if rounds < 0:
        raise ValueError(f"rounds={rounds} must not be negative")
    check_window(window)
    return choose(x, k, draw(generator), rounds, window)


def _quantile(k: int, size: int) -> float:
    """Return the magnitude that a share k / size of a standard normal distribution exceeds."""
    return -NormalDist().inv_cdf(k / size / 2)


def _choose(x: Tensor, k: int, u: Number, rounds: int, window: str) -> Tensor:
    field = Magnitudes(x, k)
    band = Band(field, k)
    t = field.rounded(field.rms() * _quantile(k, field.size))
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
    return take(field, band, u, window)


@Kernel
def fit_kernel(  # type: ignore[no-untyped-def]
    state, sums, programs: int, size, quantile,
    ROUNDS: tl.constexpr, DENSE: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """The walk of the threshold, from the keys of ranks k + 1, 2k/3 and 4k/3 + 1. ``quantile``: a double's bits."""
    tiles = tl.arange(0, TILED)
    rms = tl.sqrt(tl.sum(tl.load(sums + tiles, tiles < programs, 0.0))) / tl.sqrt(size.to(tl.float64))
    beyond, _ = rank_key(state, 0, 4, 3)
    few, _ = rank_key(state, 1, 4, 3)
    many, _ = rank_key(state, 2, 4, 3)
    low, high = first_band(beyond)
    t = rounded_key(rms * quantile.to(tl.int64).to(tl.float64, bitcast=True))
    for turn in range(ROUNDS + 2):
        more = t <= beyond
        low = tl.where(more, tl.maximum(low, t), low)
        high = tl.where(more, high, tl.minimum(high, t))
        if turn < ROUNDS:
            less, more = t > few, (t <= many) & (DENSE == 0)
        else:
            less = t > beyond
        t = rounded_key(size_of(t) * tl.where(less, 0.5, tl.where(more, 1.5, 1.0)))
    tl.store(state + LOW, low)
    tl.store(state + HIGH, high)


@fused(_choose)
def choose(x: Tensor, k: int, u: Number, rounds: int, window: str) -> Tensor:
    size = x.numel()
    if k == size:
        return torch.arange(k, device=x.device)
    few, many = math.ceil(_LOW * k), math.floor(_HIGH * k) + 1
    found = Ranked(x, (k + 1, few, min(many, size)), moment=2)
    quantile = int.from_bytes(struct.pack("<d", _quantile(k, size)), "little")
    fit_kernel(
        1, found.state, found.sums, found.programs, size, quantile, ROUNDS=rounds, DENSE=int(many > size), TILED=TILES
    )
    return found.take(k, u, window)
