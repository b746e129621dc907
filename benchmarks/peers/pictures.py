"""The pictures of the page: bars of the seconds to a loss on every network, and loss against time on two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from page import Verdict, cells, named, of_cell, shown, title

Run = dict[str, Any]
DASHES = {"thinwire": "-", "DDP": "--"}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
SIZE = "3.3M-long"
DRAWN = (
    "ddp",
    "torch-powersgd rank=4",
    "cast dtype=int8",
    "powersgd rank=4",
    "local sync_every=8 codec=int8 fragment_sync_delay=3",
    "torchft LocalSGD",
    "hivemind, local updates",
)
GREY, ORANGE, BLUE = "#b4bcc6", "#d98a3d", "#2a6f97"


def draw_times(verdicts: list[Verdict], path: Path) -> None:
    """Three bars for each network: DDP, the best of the others, thinwire's best; 1 is a network that costs nothing."""
    figure, axis = plt.subplots(figsize=(9.0, 1.0 + 0.55 * len(verdicts)), layout="constrained")
    places = range(len(verdicts))[::-1]
    bars = {
        "DDP": ([one.ddp or 0.0 for one in verdicts], GREY),
        "best other library": ([one.other.times[1] for one in verdicts], ORANGE),
        "best thinwire row": ([one.ours.times[1] for one in verdicts], BLUE),
    }
    for number, (label, (values, colour)) in enumerate(bars.items()):
        axis.barh([place + 0.27 * (1 - number) for place in places], values, 0.25, color=colour, label=label)
    axis.set_yticks(list(places), [one.where for one in verdicts])
    axis.set_xscale("log")
    axis.set_xlim(left=0.9)
    axis.margins(y=0.01)
    axis.set_xticks((1, 2, 5, 10, 20, 50, 100), ["1", "2", "5", "10", "20", "50", "100"])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("seconds to DDP's loss, over DDP's without a network; less is better")
    figure.legend(loc="outside upper center", ncols=3)
    _save(figure, path)


def draw_curves(results: Run, path: Path) -> None:
    """Held-out loss against seconds of training, in units of DDP's seconds to the loss in the same run."""
    chosen = [cell for cell in cells(results) if cell[0] == SIZE]
    figure, axes = plt.subplots(1, len(chosen), figsize=(5.0 * len(chosen), 4.6), squeeze=False, layout="constrained")
    lines: dict[str, Any] = {}
    for axis, cell in zip(axes.flat, chosen):
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
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=2, fontsize=9)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
