"""What one rank run leaves behind: plain data, written by rank 0, read by the parent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.durable import write_whole


@dataclass
class Point:
    """One point of a training curve: seconds of training so far, smoothed training loss, held-out loss."""

    step: int
    seconds: float
    loss: float
    validation: float | None = None

    @property
    def judged(self) -> float:
        """By which rows are compared: the held-out loss, or the training loss where nothing is held out."""
        return self.loss if self.validation is None else self.validation


@dataclass
class RowRecord:
    """What was measured of one row.

    Attributes:
        step_seconds: one per timed step: the slowest rank's seconds.
        forward_seconds: the same for the forward pass.
        host_seconds: one per timed step: CPU seconds of the main thread, the largest over ranks.
        losses: one per step from the first, warm-up included: the mean over ranks.
        wire_bytes: bytes sent per step, mean over nodes ("interface") or ranks ("stats", "formula").
        wire_source: where that comes from.
        untimed_seconds: of the steps before the timed ones, the slowest rank's: warm-up, measuring for a plan.
        curve: only where curves were asked for.
        predicted_seconds: of a step, where a prediction was asked for.
        waited_seconds: of thinwire's rows, how long rank 0's backward and forward waited for communication in a step.
        error: why the row failed; "" if it did not.
    """

    label: str
    kind: str
    family: str = ""
    step_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire_bytes: float | None = None
    wire_source: str = ""
    host_seconds: list[float] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    predicted_seconds: float | None = None
    error: str = ""
    untimed_seconds: float = 0.0
    waited_seconds: tuple[float, float] | None = None

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RowRecord:
        """Read back what ``asdict`` made, or some of it."""
        return cls(**{**data, "curve": [Point(**point) for point in data["curve"]]})


@dataclass
class RunRecord:
    """All rows of one run and what they share."""

    describe: str
    parameters: int
    tensors: int
    gradient_bytes: int
    workers: int
    interface: str | None
    rows: list[RowRecord]

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        write_whole(path, json.dumps(asdict(self)), synced=False)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read back what ``write`` wrote."""
        return cls.from_data(json.loads(path.read_text()))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RunRecord:
        """Read back what ``asdict`` made."""
        return cls(**{**data, "rows": [RowRecord.from_data(row) for row in data["rows"]]})


def seconds_to(curve: list[Point], target: float) -> float | None:
    """When a curve first is at or below a loss, linear between points; None if it never is."""
    return reached(((p.seconds, p.judged) for p in curve), target)


def reached(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """Where (place, loss) first is at or below a loss, linear between points; None if it never is."""
    start, above = 0.0, math.nan  # of the point before
    for place, loss in points:
        if loss <= target:
            share = 1.0 if math.isnan(above) else (above - target) / (above - loss)
            return start + (place - start) * share
        start, above = place, loss
    return None
