"""The pictures of the page: loss against time, and bars of step times, a panel for every link and number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from page import DRAWN, cells, named, of_cell, shown, title

Run = dict[str, Any]
DASHES = {"thinwire": "-", "DDP": "--"}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


def _panels(results: Run, height: float) -> tuple[Any, list[Any]]:
    count = len(cells(results))
    columns = min(2, count)
    lines = -(-count // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6.2 * columns, height * lines), squeeze=False,
                                layout="constrained")  # fmt: skip
    for unused in axes.flat[count:]:
        unused.set_visible(False)
    return figure, list(axes.flat)


def draw_curves(results: Run, path: Path) -> None:
    """Held-out loss against seconds of training, in units of DDP's seconds to the loss in the same run."""
    figure, axes = _panels(results, 4.2)
    lines: dict[str, Any] = {}
    for axis, cell in zip(axes, cells(results)):
        seen: set[str] = set()
        for run in of_cell(results, cell):
            unit = next(row["target_seconds"] for row in run["rows"] if row["label"] == "ddp")
            for row in shown(run):
                if row["label"] in DRAWN and row["label"] not in seen and row["curve"] and not row["error"] and unit:
                    seen.add(row["label"])
                    points = [(s / unit, loss) for _, s, loss in row["curve"] if s > 0]
                    dash = next((d for start, d in DASHES.items() if title(row).startswith(start)), ":")
                    colour = f"C{DRAWN.index(row['label'])}"
                    (line,) = axis.plot(*zip(*points), dash, color=colour, linewidth=1.6)
                    lines.setdefault(title(row), line)
        target = results["settings"][cell[0]]["target"]
        axis.axhline(target, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axis.minorticks_off()
        axis.set_ylim(target - 0.1, 4.5)
        axis.set_title(named(cell), fontsize=10)
        axis.set_xlabel("seconds of training / DDP's seconds to the loss")
        axis.set_ylabel("held-out loss")
        axis.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=3, fontsize=9)
    _save(figure, path)


def draw_steps(results: Run, path: Path) -> None:
    """A bar for every row: how many times faster its step is than DDP's in the same run."""
    figure, axes = _panels(results, 5.0)
    for axis, cell in zip(axes, cells(results)):
        bars: dict[str, tuple[float, str]] = {}
        for run in of_cell(results, cell):
            for row in shown(run):
                if row["step_ratio"] and not row["error"] and row["label"] != "ddp":
                    colour = {"t": "#2a6f97", "D": "#8c9bab"}["t" if title(row).startswith("thinwire") else "D"]
                    bars.setdefault(title(row), (1 / row["step_ratio"], colour))
        names = list(bars)[::-1]
        axis.barh(names, [bars[name][0] for name in names], color=[bars[name][1] for name in names])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_title(named(cell), fontsize=10)
        axis.set_xlabel("times faster than DDP, by steps")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
