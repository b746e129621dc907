"""Among methods that reach a loss equally soon, take the simpler one: the same rule for predicted and raced times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

TIE = 0.10
"""Relative delay in time to a loss, by the median and the maximum, up to which a method counts as equally fast."""


class Rival(Protocol):
    """A method, and when it reaches a loss."""

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds: minimum, median and maximum over seeds; infinite if a seed did not reach the loss."""

    @property
    def apart(self) -> bool:
        """Whether workers train apart between exchanges."""

    @property
    def bytes_sent(self) -> float:
        """Bytes sent per step."""


_Rival = TypeVar("_Rival", bound=Rival)


def overlap(one: Rival, other: Rival) -> bool:
    """Return whether the ranges of the seeds' times overlap."""
    return one.times[0] <= other.times[2] and other.times[0] <= one.times[2]


def as_soon(one: Rival, first: Rival) -> bool:
    """Return whether the seeds overlap with those of ``first``, and median and maximum are at most 10 % later."""
    return overlap(one, first) and all(a <= (1 + TIE) * b for a, b in zip(one.times[1:], first.times[1:]))


def simplest(first: _Rival, tied: Sequence[_Rival]) -> _Rival:
    """Among methods as fast as ``first``, prefer those that keep workers together, then the one that sends the most."""
    return min((first, *tied), key=lambda one: (one.apart, -one.bytes_sent))
