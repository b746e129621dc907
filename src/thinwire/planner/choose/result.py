"""The outcome of a choice as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from thinwire.planner.timeline.bottleneck import Bound
from thinwire.program.plan import UNREADABLE


@dataclass(frozen=True)
class Entry:
    """One candidate, predicted.

    Attributes:
        label: as the caller wrote it.
        method: its registry name.
        options: of the method; what JSON cannot hold as text.
        exact: whether the result is the plain average.
        dense: S-SGD, or its 16-bit form: what lossy methods have to beat.
        step_seconds: from one forward to the next.
        low_seconds, high_seconds: the band, see ``choose``.
        exposed_seconds: communication while nothing is computed.
        bytes_sent: by one rank per step.
        bound_by: the resource without which the step would be shortest.
        every: steps between two exchanges.
        steps: to a loss, over those of plain averaging; None: not measured.
        most_steps: the most that were seen; None: not measured, or some seed did not get there.
        steps_source: where that comes from.
        speedup: how many times sooner than dense fp32 at that loss; None: not known.
        measured_share: of the step, the part whose price was measured here.
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
    speedup: float | None
    measured_share: float

    def __hash__(self) -> int:
        return hash((self.label, self.step_seconds, self.bytes_sent))


@dataclass(frozen=True)
class Ranking:
    """All candidates in order, and what follows.

    Attributes:
        model: name of the profile.
        workers: ranks in all.
        entries: exact ones first, then lossy ones; the soonest at a loss first within each, those of which that is not
            known last.
        best: the recommendation.
        best_exact: the same without lossy methods.
        sentence: why.
        left_out: (label, reason) of candidates that cannot run on this cluster or have no price.
    """

    model: str
    workers: int
    entries: tuple[Entry, ...]
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
        """Of the best entry's step, the part whose price was measured here."""
        return self.best.measured_share

    def entry(self, label: str) -> Entry:
        """The entry of a label.

        Raises:
            ValueError: there is none.
        """
        for entry in self.entries:
            if entry.label == label:
                return entry
        raise ValueError(f"no entry {label!r}; there are {', '.join(entry.label for entry in self.entries)}")

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {
            "model": self.model,
            "workers": self.workers,
            "best": self.best.label,
            "best_exact": self.best_exact.label,
            "sentence": self.sentence,
            "measured_share": self.measured_share,
            "entries": [asdict(entry) for entry in self.entries],
            "left_out": [list(pair) for pair in self.left_out],
        }

    def to_json(self) -> str:
        """The ranking as JSON text."""
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str) -> Ranking:
        """Read back what ``to_json`` wrote.

        Raises:
            ValueError: the text holds no ranking.
        """
        try:
            data: Any = json.loads(text)
            entries = {e["label"]: Entry(**{f.name: e[f.name] for f in fields(Entry)}) for e in data["entries"]}
            return cls(
                str(data["model"]),
                int(data["workers"]),
                tuple(entries.values()),
                entries[data["best"]],
                entries[data["best_exact"]],
                str(data["sentence"]),
                tuple((str(label), str(reason)) for label, reason in data["left_out"]),
            )
        except UNREADABLE as error:
            raise ValueError(f"this is not a thinwire ranking: {error}") from error

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def hash(self) -> str:
        """A short digest, the same on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()
