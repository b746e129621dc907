"""The picture of a federated run: what was evaluated, against rounds and against seconds."""

from __future__ import annotations

from thinwire.federated.history import History
from thinwire.pictures import Panel, Picture, Series


def history_picture(history: History, title: str) -> Picture:
    """Two panels for each number that was evaluated, and for the training loss; a share has an axis from 0 to 1."""
    name = str(history.about.get("inner", history.about)["algorithm"])
    curves = {
        number: [(row.round, row.evaluation[number]) for row in history.rounds if number in row.evaluation]
        for number in sorted({number for row in history.rounds for number in row.evaluation})
    }
    curves["training loss"] = [(row.round, row.metrics["loss"]) for row in history.rounds if "loss" in row.metrics]
    clock, at = 0.0, {}
    for row in history.rounds:
        clock += row.client_seconds if row.client_seconds is not None else row.seconds
        at[row.round] = clock
    traced = any(row.client_seconds is not None for row in history.rounds)
    axis = "seconds on the clients' devices (trace)" if traced else "seconds"
    panels = []
    for number, points in curves.items():
        values = tuple(value for _, value in points)
        limits = (0.0, 1.0) if number == "accuracy" else None
        rounds = Series(name, tuple(float(r) for r, _ in points), values)
        seconds = Series(name, tuple(at[r] for r, _ in points), values)
        panels.append(Panel("round", number, (rounds,), y_range=limits))
        panels.append(Panel(axis, number, (seconds,), y_range=limits))
    return Picture(title, tuple(panels))
