"""Curves of a federated run: what was evaluated, against rounds and against seconds."""

from __future__ import annotations

from pathlib import Path

from thinwire.bench.plots import _plotly, _pyplot, _save
from thinwire.federated.history import History


def plot_history(history: History, path: Path, title: str) -> None:
    """One panel for each number that was evaluated, else the training loss; ``.png`` or ``.html``.

    Raises:
        ValueError: another ending, or its library is not there.
    """
    names = sorted({name for row in history.rounds for name in row.evaluation})
    curves = {
        name: [(row.round, row.evaluation[name]) for row in history.rounds if name in row.evaluation] for name in names
    }
    curves["training loss"] = [(row.round, row.metrics["loss"]) for row in history.rounds if "loss" in row.metrics]
    clock, at = 0.0, {}
    for row in history.rounds:
        clock += row.client_seconds if row.client_seconds is not None else row.seconds
        at[row.round] = clock
    traced = any(row.client_seconds is not None for row in history.rounds)
    axis = "seconds on the clients' devices (trace)" if traced else "seconds"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        go = _plotly()
        from plotly.subplots import make_subplots

        figure = make_subplots(rows=len(curves), cols=2, shared_yaxes=True)
        for place, (name, points) in enumerate(curves.items(), 1):
            xs, ys = [r for r, _ in points], [value for _, value in points]
            figure.add_trace(go.Scatter(x=xs, y=ys, name=name), row=place, col=1)
            figure.add_trace(go.Scatter(x=[at[r] for r in xs], y=ys, showlegend=False), row=place, col=2)
            figure.update_yaxes(title_text=name, row=place, col=1)
        figure.update_xaxes(title_text="round", row=len(curves), col=1)
        figure.update_xaxes(title_text=axis, row=len(curves), col=2)
        figure.update_layout(title=title)
        figure.write_html(path, include_plotlyjs=True)
        return
    plt = _pyplot()
    figure, axes = plt.subplots(len(curves), 2, figsize=(9, 2.8 * len(curves)), squeeze=False)
    for (left, right), (name, points) in zip(axes, curves.items()):
        xs, ys = [r for r, _ in points], [value for _, value in points]
        left.plot(xs, ys, marker="o", markersize=3)
        right.plot([at[r] for r in xs], ys, marker="o", markersize=3)
        left.set_ylabel(name)
        left.set_xlabel("round")
        right.set_xlabel(axis)
        for one in (left, right):
            one.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    _save(plt, figure, path)
