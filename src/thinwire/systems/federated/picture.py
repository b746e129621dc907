"""The picture of federated runs: evaluated numbers against rounds and against seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thinwire.systems.federated.history import TRAINING_LOSS, History
from thinwire.systems.federated.per_client import MEDIAN, WORST
from thinwire.tools.pictures import Level, Panel, Picture, Series

_SHARES = ("accuracy", MEDIAN, WORST)


def history_picture(runs: Mapping[str, History], title: str, chance: Mapping[str, float] | None = None) -> Picture:
    """Draw a panel for each evaluated number and the training loss, against rounds; the first also against seconds.

    Args:
        runs: by the names of their lines.
        title: of the picture.
        chance: what guessing reaches, by number: a horizontal line in its panels.
    """
    evaluated = sorted({number for history in runs.values() for row in history.rounds for number in row.evaluation})
    traced = any(row.client_seconds is not None for history in runs.values() for row in history.rounds)
    clock = "seconds on the clients' devices (trace)" if traced else "seconds"
    levels = {number: (Level(value, "chance"),) for number, value in (chance or {}).items()}
    panels: list[Panel] = []
    for number in (*evaluated, TRAINING_LOSS):
        points = {name: list(_points(history, number)) for name, history in runs.items()}
        limits = (0.0, 1.0) if number in _SHARES else None
        for axis, place in (("rounds", 0), (clock, 1))[: 1 if panels else 2]:
            lines = tuple(
                Series(name, tuple(point[place] for point in found), tuple(point[2] for point in found))
                for name, found in points.items()
            )
            panels.append(Panel(axis, number, lines, levels=levels.get(number, ()), y_range=limits))
    return Picture(title, tuple(panels))


def _points(history: History, number: str) -> Iterator[tuple[float, float, float]]:
    """Yield (rounds, seconds, value)."""
    if number in history.start:
        yield 0.0, 0.0, history.start[number]
    clock = 0.0
    for row in history.rounds:
        clock += row.client_seconds if row.client_seconds is not None else row.seconds
        if number in row.numbers:
            yield float(row.round + 1), clock, row.numbers[number]
