"""Virtual time: a clock that jumps from event to event, and lines that carry one thing after another. No waiting."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class VirtualTime:
    """A clock. Events at the same time happen by their ``turn``, then in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, int, Callable[[], object]]] = []
        self._made = 0

    def at(self, seconds: float, action: Callable[[], object], turn: int = 0) -> None:
        self._made += 1
        heapq.heappush(self._coming, (seconds, turn, self._made, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    @property
    def next(self) -> tuple[float, int]:
        """Time and turn of the next event; infinite: there is none."""
        return self._coming[0][:2] if self._coming else (math.inf, 0)

    def step(self) -> None:
        """Jump to the next event."""
        self.now, *_, action = heapq.heappop(self._coming)
        action()


class Line:
    """Carries one thing after another, first come, first served."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def carry(self, ready: float, seconds: float) -> float:
        """Return when something that was ready at this time and takes so long has been carried."""
        self.free_at = max(ready, self.free_at) + seconds
        return self.free_at
