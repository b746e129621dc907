"""Of methods that are as soon at a loss the simpler one is taken: of predicted times and of raced ones, by one rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

TIE = 0.10
"""By how much the time to a loss may be longer, by the median and at its worst, for a method to count as as soon."""


class Rival(Protocol):
    """A method, and when it is at a loss."""

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds: the least, the median and the most over seeds; infinite where a seed did not get there."""

    @property
    def apart(self) -> bool:
        """Whether workers train apart between exchanges."""

    @property
    def bytes_sent(self) -> float:
        """In a step."""


_Rival = TypeVar("_Rival", bound=Rival)


def overlap(one: Rival, other: Rival) -> bool:
    """Whether what their seeds took has something in common."""
    return one.times[0] <= other.times[2] and other.times[0] <= one.times[2]


def as_soon(one: Rival, first: Rival) -> bool:
    """Whether its seeds overlap with those of ``first``, and their median and their most are at most 10 % later."""
    return overlap(one, first) and all(a <= (1 + TIE) * b for a, b in zip(one.times[1:], first.times[1:]))


def simplest(first: _Rival, tied: Sequence[_Rival]) -> _Rival:
    """Of methods that are as soon as ``first``: one that keeps workers together, then the one that sends the most."""
    return min((first, *tied), key=lambda one: (one.apart, -one.bytes_sent))
