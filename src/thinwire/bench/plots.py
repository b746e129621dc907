"""Pictures: bars of step times, curves of loss against seconds. PNG through matplotlib, HTML through plotly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.bench.record import Point, RowRecord, reached, seconds_to
from thinwire.bench.summary import BenchResult


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` unless this file can be written: its ending is known and its library is there."""
    if path.suffix == ".png":
        _pyplot()
    elif path.suffix == ".html":
        _plotly()
    else:
        raise ValueError(f"--plot {path}: the name must end in .png or .html")


def plot_bench(result: BenchResult, path: Path) -> None:
    """One bar per row: compute and exposed communication; the floor as a line."""
    rows = [row for row in result.rows if row.step_seconds is not None]
    names = [row.label for row in rows]
    compute = [min(result.compute_seconds, row.step_seconds or 0.0) for row in rows]
    exposed = [max(row.exposed_seconds or 0.0, 0.0) for row in rows]
    title = f"{result.model}, {result.workers} workers, link {result.link or 'no limit'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        go = _plotly()
        bars = [go.Bar(name="compute", x=names, y=compute), go.Bar(name="exposed", x=names, y=exposed)]
        figure = go.Figure(bars, {"barmode": "stack", "title": title, "yaxis": {"title": "seconds per step"}})
        figure.add_hline(y=result.floor_seconds, line_dash="dash", annotation_text="floor, exact methods")
        figure.write_html(path, include_plotlyjs=True)
        return
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(1.4 * len(rows) + 3, 4.5))
    axes.bar(names, compute, label="compute alone", color="#8c9bab")
    axes.bar(names, exposed, bottom=compute, label="exposed communication", color="#d1603d")
    axes.axhline(result.floor_seconds, linestyle="--", color="black", linewidth=1, label="floor, exact methods")
    axes.set_ylabel("seconds per step")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend()
    _save(plt, figure, path)


def plot_curves(rows: list[RowRecord], path: Path, title: str, *, target: float | None = None) -> None:
    """Held-out loss (training loss where there is none) against seconds of training, and when each is at ``target``."""
    plt = _pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(8, 4.8))
    for row in rows:
        if row.curve:
            values = [p.judged for p in row.curve]
            (line,) = axes.plot([p.seconds for p in row.curve], values, marker="o", markersize=3, label=row.label)
            if target is not None and (there := seconds_to(row.curve, target)) is not None:
                axes.axvline(there, color=line.get_color(), linestyle=":")
                axes.annotate(f"{there:.1f} s", (there, max(values)), xytext=(-4, -8), textcoords="offset points",
                              color=line.get_color(), ha="right")  # fmt: skip
    if target is not None:
        axes.axhline(target, color="#8c9bab", linestyle="--", linewidth=1, label=f"loss {target:.3f}")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss on held-out text")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(plt, figure, path)


def plot_race(curves: Mapping[str, list[Point]], target: float, path: Path, title: str) -> None:
    """Loss against seconds of training on a logarithmic axis, with a mark where each is at the target."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8))
    axes.axhline(target, linestyle="--", color="black", linewidth=1)
    for label, points in curves.items():
        shown = [point for point in points if point.seconds > 0]
        at = reached(((point.seconds, point.loss) for point in points), target)
        said = label if at is None else f"{label}: {at:.3g} s"
        (line,) = axes.plot([p.seconds for p in shown], [p.loss for p in shown], linewidth=1.5, label=said)
        if at is not None:
            axes.plot([at], [target], marker="o", markersize=7, color=line.get_color())
    held_out = any(point.validation is not None for points in curves.values() for point in points)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds of training, start-up included")
    axes.set_ylabel("loss on held-out data" if held_out else "training loss")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(title=f"at a loss of {target:.3f}", fontsize=9)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ValueError("a plot as .png needs matplotlib: pip install 'thinwire[plot]'") from error
    return plt


def _plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ValueError("a plot as .html needs plotly: pip install 'thinwire[report]'") from error
    return go
