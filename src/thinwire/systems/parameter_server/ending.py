"""Connections that are closed but whose threads still run; the process waits for them at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Ending(Protocol):
    """A connection, or several that act as one, whose threads take a while to end."""

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` until they have."""


_One = TypeVar("_One", bound=Ending)


def unended(old: Iterable[_One], *more: _One) -> list[_One]:
    """Return the connections that still have threads, and those just closed, to be joined at the end."""
    return [*(one for one in old if not one.ended), *more]


def join_all(connections: Iterable[Ending], seconds: float, least: float = 0.0) -> None:
    """Wait up to ``seconds`` for all of them together, but at least ``least`` seconds for each."""
    end = time.monotonic() + seconds
    for connection in connections:
        connection.join(max(least, end - time.monotonic()))
