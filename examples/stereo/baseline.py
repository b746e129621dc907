"""What the example compares with and draws: classical block matching, one real pair, disparity maps side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import torch
from thinwire.supernet.stereo.data import middlebury_motorcycle
from thinwire.supernet.stereo.evaluation import box_match
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["box_match", "draw_disparities", "middlebury_motorcycle"]


def draw_disparities(
    path: str | Path, left: Tensor, truth: Tensor, found: Mapping[str, Tensor], bound: float = 5.0
) -> None:
    """One column per estimate: the map above, its error below; the picture and the truth first.

    Args:
        path: of the PNG.
        left: ``[3, H, W]`` in 0..1. truth: ``[H, W]``, infinite where unknown; its range is the colours' range.
        found: ``[H, W]`` by name.
        bound: error in pixels that is drawn in the last colour.
    """
    known = truth.isfinite() & (truth > 0)
    low, high = (
        float(v)
        for v in torch.quantile(truth[known][:: max(1, int(known.sum()) // 100_000)], torch.tensor([0.01, 0.99]))
    )
    figure, axes = plt.subplots(2, 1 + len(found), figsize=(3.4 * (1 + len(found)), 5.6), squeeze=False)
    axes[0][0].imshow(left.permute(1, 2, 0).clamp(0, 1))
    axes[0][0].set_title("left view", fontsize=9)
    axes[1][0].imshow(torch.where(known, truth, torch.nan), cmap="turbo", vmin=low, vmax=high)
    axes[1][0].set_title("truth", fontsize=9)
    for column, (name, disparity) in enumerate(found.items(), 1):
        error = torch.where(known, (disparity - truth).abs(), torch.nan)
        axes[0][column].imshow(disparity, cmap="turbo", vmin=low, vmax=high)
        axes[0][column].set_title(name, fontsize=9)
        axes[1][column].imshow(error, cmap="magma", vmin=0, vmax=bound)
        axes[1][column].set_title(f"error, mean {float(error.nanmean()):.2f} px; white: no truth", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
