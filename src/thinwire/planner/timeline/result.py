"""The result of a simulated step: its events by lane, its length, and the communication that nothing hides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from thinwire.program import Plan

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
        duration_seconds: length.
        bucket: its index in the plan, if it belongs to a bucket.
        bytes: bytes sent by this rank.
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
        plan: the buckets.
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
    """Return the length of the union of (start, end) pairs."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total
