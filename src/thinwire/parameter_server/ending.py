"""Connections that were closed and whose threads have not ended yet: at the end of the process they are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Ending(Protocol):
    """A connection, or several that look like one, whose threads take a while to end."""

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""

    def join(self, seconds: float) -> None:
        """Wait, at most so long, until they have."""


_One = TypeVar("_One", bound=Ending)


def unended(old: Iterable[_One], *more: _One) -> list[_One]:
    """Those that still have threads, and those that were closed just now: to be joined in the end."""
    return [*(one for one in old if not one.ended), *more]


def join_all(connections: Iterable[Ending], seconds: float, least: float = 0.0) -> None:
    """Wait, at most so long for all together, but ``least`` seconds for each."""
    end = time.monotonic() + seconds
    for connection in connections:
        connection.join(max(least, end - time.monotonic()))
