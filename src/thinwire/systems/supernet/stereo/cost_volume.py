"""From two feature maps to a disparity: correlation over shifts, and the softmax-weighted mean of the shifts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def correlation(left: Tensor, right: Tensor, disparities: int) -> Tensor:
    """Return how well each pixel matches the pixel ``d`` columns further left in the other view.

    Args:
        left, right: features ``[B, C, H, W]``.
        disparities: d is from 0 to this, exclusive.

    Returns:
        ``[B, disparities, H, W]``: the mean over channels of ``left[x] * right[x - d]``; 0 if ``x < d``.
    """
    width = left.shape[3]
    shifted = F.pad(right, (disparities - 1, 0))
    first = disparities - 1
    return torch.stack(
        [(left * shifted[..., first - d : first - d + width]).mean(1) for d in range(disparities)], dim=1
    )


def soft_argmax(volume: Tensor) -> Tensor:
    """Return the mean of d under the softmax over d, in pixels of this scale: ``[B, D, H, W]`` -> ``[B, H, W]``."""
    candidates = torch.arange(volume.shape[1], dtype=volume.dtype, device=volume.device)
    return (volume.softmax(1) * candidates[:, None, None]).sum(1)
