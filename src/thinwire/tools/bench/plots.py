"""Plots: bars of step times, and curves of loss against seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinwire.tools.bench.record import Point, reached
from thinwire.tools.bench.summary import BenchResult
from thinwire.tools.pictures import Level, Panel, Picture, Series
from thinwire.tools.pictures.draw import plotly, pyplot, save_png


def plot_bench(result: BenchResult, path: Path) -> None:
    """Plot one bar per row, with compute and exposed communication, and the floor as a line."""
    rows = [row for row in result.rows if row.step_seconds is not None]
    names = [row.label for row in rows]
    compute = [min(result.compute_seconds, row.step_seconds or 0.0) for row in rows]
    exposed = [max(row.exposed_seconds or 0.0, 0.0) for row in rows]
    title = f"{result.model}, {result.workers} workers, link {result.link or 'no limit'}"
    if path.suffix == ".html":
        go = plotly()
        bars = [go.Bar(name="compute", x=names, y=compute), go.Bar(name="exposed", x=names, y=exposed)]
        figure = go.Figure(bars, {"barmode": "stack", "title": title, "yaxis": {"title": "seconds per step"}})
        figure.add_hline(y=result.floor_seconds, line_dash="dash", annotation_text="floor, exact methods")
        figure.write_html(path, include_plotlyjs=True)
        return
    figure, axes = pyplot().subplots(figsize=(1.4 * len(rows) + 3, 4.5))
    axes.bar(names, compute, label="compute alone", color="#8c9bab")
    axes.bar(names, exposed, bottom=compute, label="exposed communication", color="#d1603d")
    axes.axhline(result.floor_seconds, linestyle="--", color="black", linewidth=1, label="floor, exact methods")
    axes.set_ylabel("seconds per step")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend()
    save_png(figure, path)


def loss_picture(
    curves: Mapping[str, Sequence[Point]], title: str, target: float | None = None, *, log: bool = False
) -> Picture:
    """Draw held-out loss (or training loss if there is none) against seconds of training, with a mark where each row
    reaches ``target``; ``log``: on a logarithmic axis, on which no line begins at 0.
    """
    lines = []
    for label, points in curves.items():
        shown = [p for p in points if not math.isnan(p.judged) and (p.seconds > 0 or not log)]
        x, y = tuple(p.seconds for p in shown), tuple(p.judged for p in shown)
        there = None if target is None else reached(((p.seconds, p.judged) for p in points), target)
        if there is None or target is None:
            lines.append(Series(label, x, y))
        else:
            lines.append(Series(label, x, y, at=(there, target), said=f"{there:.3g} s"))
    held_out = any(point.validation is not None for points in curves.values() for point in points)
    panel = Panel(
        "seconds of training, start-up included" if log else "seconds of training",
        "loss on held-out data" if held_out else "training loss",
        tuple(lines),
        levels=() if target is None else (Level(target, f"loss {target:.3f}"),),
        log_x=log,
    )
    return Picture(title, (panel,))
