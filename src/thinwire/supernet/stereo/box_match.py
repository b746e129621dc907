"""Classical block matching: the baseline that a trained network has to beat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def box_match(left: Tensor, right: Tensor, disparities: int, window: int = 9) -> Tensor:
    """Of each left pixel the shift with the smallest mean absolute difference of colours in a square window.

    Args:
        left, right: views ``[3, H, W]`` in 0..1.
        disparities: shifts from 0 to this, exclusive. window: side of the square, odd; it ends at the border.

    Returns:
        ``[H, W]``, whole pixels: no smoothing, no check from the other side, nothing between pixels.
    """
    height, width = left.shape[1:]
    best = torch.full((height, width), torch.inf, dtype=left.dtype)
    found = torch.zeros(height, width, dtype=left.dtype)
    for d in range(min(disparities, width)):
        cost = left.new_full((1, 1, height, width), 3.0)  # dearer than any difference: out of the right view
        cost[0, 0, :, d:] = (left[:, :, d:] - right[:, :, : width - d]).abs().mean(0)
        mean = F.avg_pool2d(cost, window, 1, window // 2, count_include_pad=False)[0, 0]
        better = mean < best
        best, found = torch.where(better, mean, best), torch.where(better, float(d), found)
    return found
