"""What training minimises: the error of every disparity map of the pyramid, at full size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def valid(truth: Tensor, max_disparity: float) -> Tensor:
    """Return where the truth is used: finite, above 0, below the largest disparity."""
    return truth.isfinite() & (truth > 0) & (truth < max_disparity)


def weights(maps: int) -> list[float]:
    """Return the weights of the maps, coarse to fine: 1/3, 2/3, then 1."""
    return [(1 / 3, 2 / 3)[i] if i < 2 else 1.0 for i in range(maps)]


def enlarged(disparity: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize ``[B, h, w]`` to ``[B, H, W]``, in pixels of the new size."""
    if tuple(disparity.shape[1:]) == size:
        return disparity
    larger = F.interpolate(disparity.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)
    return larger * (size[1] / disparity.shape[2])


def pyramid_loss(
    disparities: Sequence[Tensor], truth: Tensor, max_disparity: float, valid_total: Tensor | float | None = None
) -> Tensor:
    """Return the weighted sum over maps of the mean smooth-L1 error over valid pixels.

    If no pixel is valid, it is 0 but *with* a graph, so that no rank skips its backward.

    Args:
        disparities: from ``ElasticStereo``, coarse to fine.
        truth: ``[B, H, W]`` in pixels; invalid values may be 0, infinite or NaN.
        max_disparity: truth of at least this is not used.
        valid_total: divisor that replaces this batch's number of valid pixels: with the number over all ranks, divided
            by the number of ranks, the ranks' average is the loss of one large batch.
    """
    mask = valid(truth, max_disparity)
    goal = torch.where(mask, truth, 0.0)
    count = mask.sum() if valid_total is None else torch.as_tensor(valid_total, device=truth.device)
    total = torch.zeros((), dtype=disparities[0].dtype, device=truth.device)
    for weight, disparity in zip(weights(len(disparities)), disparities):
        size = (truth.shape[1], truth.shape[2])
        error = F.smooth_l1_loss(enlarged(disparity, size), goal.to(disparity.dtype), reduction="none")
        total = total + weight * torch.where(mask, error, 0.0).sum()
    return total / count.clamp_min(1)
