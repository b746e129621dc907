"""Errors of disparities, as sums that can be added over batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from thinwire.systems.supernet.stereo.loss import valid


@dataclass(frozen=True)
class Metrics:
    """Sums over valid pixels.

    Attributes:
        pixels: how many. error: sum of absolute errors in pixels.
        over1, over2, over3: pixels with a larger error. outliers: error above 3 px and above 5 % (D1 of KITTI).
    """

    pixels: float = 0.0
    error: float = 0.0
    over1: float = 0.0
    over2: float = 0.0
    over3: float = 0.0
    outliers: float = 0.0

    @property
    def epe(self) -> float:
        """End-point error: mean absolute error in pixels; NaN without a valid pixel."""
        return self.error / self.pixels if self.pixels else float("nan")

    @property
    def d1(self) -> float:
        """Share of outliers."""
        return self.outliers / self.pixels if self.pixels else float("nan")

    @property
    def bad3(self) -> float:
        """Share of pixels with an error above 3."""
        return self.over3 / self.pixels if self.pixels else float("nan")

    def vector(self) -> Tensor:
        """Return the sums as ``[6]``, fp64, for adding over ranks."""
        return torch.tensor([getattr(self, f.name) for f in fields(self)], dtype=torch.float64)

    @classmethod
    def of(cls, vector: Tensor) -> Metrics:
        """Build metrics from the result of ``vector``."""
        return cls(*vector.tolist())

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics.of(self.vector() + other.vector())


def measure(disparity: Tensor, truth: Tensor, max_disparity: float) -> Metrics:
    """Compare ``[B, H, W]`` with the truth where it is valid."""
    mask = valid(truth, max_disparity)
    goal = torch.where(mask, truth, 0.0).double()
    error = torch.where(mask, (disparity.double() - goal).abs(), 0.0)
    one, two, three = (float((error > bound).sum()) for bound in (1, 2, 3))
    outliers = float(((error > 3) & (error > 0.05 * goal)).sum())
    return Metrics(float(mask.sum()), float(error.sum()), one, two, three, outliers)
