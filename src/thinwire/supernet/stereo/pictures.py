"""Pictures of results: disparity maps and error maps side by side, and error against latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.supernet.search import Candidate, pareto


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'thinwire[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


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
    plt = _pyplot()
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
    _save(plt, figure, path)


def draw_pareto(
    path: str | Path, archive: Sequence[Candidate], best: Candidate, limit_ms: float, title: str = ""
) -> None:
    """Every candidate's error against its latency, the limit and the answer."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    ms, error = [c.predicted_ms for c in archive], [-c.fitness for c in archive]
    axes.scatter(ms, error, s=12, color="#8c9bab", label="candidates, predicted latency")
    front = pareto(archive)
    axes.step(
        [c.predicted_ms for c in front], [-c.fitness for c in front], where="post", color="#4a6fa5", label="best so far"
    )
    axes.axvline(limit_ms, linestyle="--", color="black", linewidth=1, label=f"limit, {limit_ms:g} ms")
    axes.scatter([best.measured_ms], [-best.fitness], marker="*", s=140, color="#d1603d", label="answer, measured")
    axes.set_xlabel("latency of one pair, ms")
    axes.set_ylabel("end-point error, px")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
