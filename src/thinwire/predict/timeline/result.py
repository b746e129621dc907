"""The result of a simulated step: its events by lane, its length, and the communication that nothing hides."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.core.program import Plan

COMPUTE, METHOD = "compute", "method"
LANES = (COMPUTE, METHOD, "link world", "link node", "link cross")
"""Forward, backward and optimizer; the methods' own work; the exchanges of each scope."""
EXCHANGE_CPU = "exchange on the CPU"
"""Event name for the CPU time that exchanges take from compute: it counts as communication."""


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        name: the operation, the module, the parameter, ...
        lane: one of ``LANES``.
        start_seconds: time from the start of the recording.
        bucket: its index in the plan, if it belongs to a bucket.
    """

    name: str
    lane: str
    start_seconds: float
    duration_seconds: float
    bucket: int | None = None
    bytes: int = 0

    @property
    def end_seconds(self) -> float:
        """When it ended."""
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True)
class Timeline:
    """A simulated step in the steady state.

    Attributes:
        step_seconds: from one forward to the next; mean over the method's phases.
        exposed_seconds: communication while nothing is computed, method work included; mean over the phases.
        events: events of one step of each phase, one after the other.
        bytes_sent: bytes sent by this rank per step; mean over the phases, rounded.
        every: steps between two exchanges; the means above cover that many steps.
    """

    step_seconds: float
    exposed_seconds: float
    events: tuple[Event, ...] = field(repr=False)
    bytes_sent: int
    plan: Plan = field(repr=False)
    every: int = 1


def exposed_seconds(events: Iterable[Event]) -> float:
    """Return the total length of the communication intervals minus the compute intervals."""
    working: list[tuple[float, float]] = []
    sending: list[tuple[float, float]] = []
    for event in events:
        if event.name != EXCHANGE_CPU:
            side = working if event.lane in (COMPUTE, METHOD) else sending
            side.append((event.start_seconds, event.end_seconds))
    return union_seconds([*working, *sending]) - union_seconds(working)


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total


def to_chrome_trace(events: Sequence[Event], rank: int = 0, label: str = "predicted") -> dict[str, Any]:
    """Return one rank's events as plain data; as JSON, Perfetto and chrome://tracing open them.

    Example:
        >>> trace = to_chrome_trace([Event("AllReduce", "link world", 0.5, 0.25, 3, 1000)])
        >>> trace["traceEvents"][-1]["ts"], trace["traceEvents"][-1]["dur"]
        (500000.0, 250000.0)
    """
    others = sorted({event.lane for event in events} - set(LANES))
    threads = {lane: number for number, lane in enumerate((*LANES, *others))}
    listed = [_metadata("process_name", rank, 0, name=f"{label}, rank {rank}")]
    for lane, thread in threads.items():
        listed.append(_metadata("thread_name", rank, thread, name=lane))
        listed.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
    for event in events:
        facts = {"bucket": event.bucket, "bytes": event.bytes or None}
        listed.append(
            {
                "name": event.name,
                "cat": event.lane,
                "ph": "X",
                "ts": event.start_seconds * 1e6,
                "dur": event.duration_seconds * 1e6,
                "pid": rank,
                "tid": threads[event.lane],
                "args": {key: value for key, value in facts.items() if value is not None},
            }
        )
    return {"traceEvents": listed, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], events: Sequence[Event], rank: int = 0, label: str = "predicted") -> None:
    """Write a trace to a file."""
    Path(path).write_text(json.dumps(to_chrome_trace(events, rank, label)), encoding="utf-8")


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}
