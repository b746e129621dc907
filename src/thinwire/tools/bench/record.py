"""The record of one run of ranks: plain data, written by rank 0, read by the parent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.core.durable import write_whole


@dataclass
class Point:
    """One point of a training curve: seconds of training so far, smoothed training loss, held-out loss."""

    step: int
    seconds: float
    loss: float
    validation: float | None = None

    @property
    def judged(self) -> float:
        """The loss by which rows are compared: held-out loss, or training loss if nothing is held out."""
        return self.loss if self.validation is None else self.validation


@dataclass
class RowRecord:
    """The measurements of one row.

    Attributes:
        step_seconds: one per timed step: the slowest rank's seconds.
        forward_seconds: the same for forward.
        host_seconds: one per timed step: CPU seconds of the main thread, the largest over ranks.
        losses: one per step from the first, warm-up included: mean over ranks.
        wire_bytes: bytes sent per step, mean over nodes ("interface") or ranks ("stats", "formula").
        wire_source: source of that number.
        untimed_seconds: seconds of the steps before the timed ones, of the slowest rank: warm-up, measuring for a plan.
        curve: only if curves were requested.
        predicted_seconds: predicted seconds of a step, if requested.
        waited_seconds: for thinwire rows, how long rank 0's backward and forward waited for communication in a step.
        why: for thinwire rows, the reasons for the plan; the first names what ``auto`` chose.
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
    why: list[str] = field(default_factory=list)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RowRecord:
        """Read back what ``asdict`` made, or part of it."""
        return cls(**{**data, "curve": [Point(**point) for point in data["curve"]]})


@dataclass
class RunRecord:
    """All rows of one run, and what they share."""

    describe: str
    parameters: int
    tensors: int
    gradient_bytes: int
    workers: int
    interface: str | None
    rows: list[RowRecord]

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        write_whole(path, json.dumps(asdict(self)), synced=False)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        return cls.from_data(json.loads(path.read_text()))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RunRecord:
        return cls(**{**data, "rows": [RowRecord.from_data(row) for row in data["rows"]]})


def seconds_to(curve: list[Point], target: float) -> float | None:
    """Return when a curve first is at or below a loss, linear between points; None if it never is."""
    return reached(((p.seconds, p.judged) for p in curve), target)


def reached(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """Return where (place, loss) first is at or below a loss, linear between points; None if it never is."""
    start, above = 0.0, math.nan  # place and loss of the previous point
    for place, loss in points:
        if loss <= target:
            share = 1.0 if math.isnan(above) else (above - target) / (above - loss)
            return start + (place - start) * share
        start, above = place, loss
    return None
