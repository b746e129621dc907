"""The outcome of a choice as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.core.records import Record, plain
from thinwire.predict.timeline.simulate import Bound

_LABELS = ("answer", "best", "best_exact")


@dataclass(frozen=True)
class Entry:
    """One candidate, predicted.

    Attributes:
        options: options of the method; values that JSON cannot hold are stored as text.
        exact: whether the result is the plain average.
        dense: S-SGD or its 16-bit form, which lossy methods have to beat.
        step_seconds: from one forward to the next.
        low_seconds, high_seconds: the band, see ``choose``.
        exposed_seconds: communication while nothing is computed.
        bound_by: the resource without which the step would be shortest.
        steps: steps to a loss, relative to plain averaging; None: not measured.
        most_steps: the most measured; None: not measured, or some seed did not reach the loss.
        worth: seconds of one worker alone to a loss, over those of all workers with this; None: unknown, or one worker.
        measured_share: fraction of the step whose price was measured here.
    """

    label: str
    method: str
    options: Mapping[str, Any]
    exact: bool
    dense: bool
    step_seconds: float
    low_seconds: float
    high_seconds: float
    exposed_seconds: float
    bytes_sent: int
    bound_by: Bound
    every: int
    steps: float | None
    most_steps: float | None
    steps_source: str
    worth: float | None
    measured_share: float

    def __hash__(self) -> int:
        return hash((self.label, self.step_seconds, self.bytes_sent))


@dataclass(frozen=True)
class Ranking(Record):
    """All candidates in order, and the conclusions.

    Attributes:
        entries: exact ones first, then lossy ones; within each, the soonest to reach a loss first and unknown ones
            last.
        answer: the recommendation, which may be one worker alone, or DDP that accumulates.
        best, best_exact: the recommended method, with and without lossy ones.
        left_out: (label, reason) of candidates that cannot run on this cluster or have no price.
    """

    called: ClassVar[str] = "a thinwire ranking"
    alone: ClassVar[bool] = False

    model: str
    workers: int
    entries: tuple[Entry, ...]
    answer: Entry
    best: Entry
    best_exact: Entry
    sentence: str
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def exact(self) -> tuple[Entry, ...]:
        """Entries that give the plain average."""
        return tuple(entry for entry in self.entries if entry.exact)

    @property
    def lossy(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.exact)

    @property
    def measured_share(self) -> float:
        """Fraction of the best entry's step whose price was measured here."""
        return self.best.measured_share

    def entry(self, label: str) -> Entry:
        """Return the entry of a label; ``ValueError`` if there is none."""
        for entry in self.entries:
            if entry.label == label:
                return entry
        raise ValueError(f"no entry {label!r}; there are {', '.join(entry.label for entry in self.entries)}")

    def to_data(self) -> dict[str, Any]:
        """Return the ranking as data that JSON can hold."""
        labels = {name: getattr(self, name).label for name in _LABELS}
        return {**plain(self), **labels, "measured_share": self.measured_share}

    def to_json(self) -> str:
        """Return the ranking as JSON text."""
        return json.dumps(self.to_data())

    @classmethod
    def from_data(cls, data: Any) -> Ranking:
        """Read back what ``to_data`` returned."""
        entries = {entry["label"]: entry for entry in data["entries"]}
        return super().from_data({**data, **{name: entries[data[name]] for name in _LABELS}})

    def __hash__(self) -> int:
        return hash(self.to_json())
