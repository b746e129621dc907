"""What the example compares with and draws: classical block matching, one real pair, disparity maps side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from thinwire.supernet.stereo.data import read_disparity, read_picture
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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


def middlebury_motorcycle() -> tuple[Tensor, Tensor, Tensor]:
    """The Middlebury 2014 pair "motorcycle" that scikit-image carries.

    Returns:
        left, right ``[3, 500, 741]`` in 0..1, and the left view's disparity ``[500, 741]``, infinite where unknown.

    Raises:
        ValueError: scikit-image is not installed.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the motorcycle pair comes with scikit-image: pip install 'thinwire[stereo]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    left, right = (read_picture(folder / f"motorcycle_{side}.png") for side in ("left", "right"))
    return left, right, read_disparity(folder / "motorcycle_disp.npz")


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
