"""Virtual time: a queue of events, and links that carry one message after another. Numbers only; no real waiting.

The asynchronous packages run their state machines on it, with thousands of nodes in one process.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from thinwire.core.checks import check_number


class VirtualTime:
    """A clock that jumps from event to event; those at the same time happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        check_number("seconds", seconds, least=0)
        heapq.heappush(self._events, (self.now + seconds, self._made, action))
        self._made += 1

    def run(self, until: Callable[[], bool] | None = None, seconds: float = math.inf) -> int:
        """Run events until ``until`` is true, none is left or the clock passes ``seconds``; return their number."""
        count = 0
        while self._events and self._events[0][0] <= seconds and not (until is not None and until()):
            self.now, _, action = heapq.heappop(self._events)
            action()
            count += 1
        return count


class Card:
    """A network card: sends (or receives) one message after another; ``bits_per_second`` None: no limit."""

    def __init__(self, bits_per_second: float | None) -> None:
        if bits_per_second is not None:
            check_number("bits_per_second", bits_per_second, above=0)
        self.bits_per_second = bits_per_second
        self.free_at = 0.0
        self.bytes = 0

    def carry(self, ready: float, size: int) -> float:
        self.bytes += size
        if self.bits_per_second is None:
            return ready
        self.free_at = max(ready, self.free_at) + 8.0 * size / self.bits_per_second
        return self.free_at


class VirtualChannel:
    """Messages in order from one card to another; ``jitter``: extra seconds, which let none overtake.

    ``small_bytes``: up to so many do not queue at the cards (packets interleave). ``behind``: a channel whose earlier
    messages arrive before.
    """

    def __init__(
        self,
        time: VirtualTime,
        source: Card,
        target: Card,
        latency_seconds: float,
        jitter: Callable[[], float] | None = None,
        small_bytes: int = 1500,
        behind: VirtualChannel | None = None,
    ) -> None:
        check_number("latency_seconds", latency_seconds, least=0)
        self._time, self._source, self._target = time, source, target
        self._jitter, self._small, self._behind = jitter, small_bytes, behind
        self.latency_seconds = latency_seconds
        self._last = 0.0
        self.open = True

    def send(self, size: int, deliver: Callable[[], None], sent: Callable[[], None] | None = None) -> None:
        """Deliver a message of ``size`` bytes; ``sent`` is called when this end of the channel is free again."""
        now = self._time.now
        if size <= self._small:
            self._source.bytes += size
            self._target.bytes += size
            left = passed = now
        else:
            left = self._source.carry(now, size)
            passed = self._target.carry(left, size) if self._target is not self._source else left
        arrival = passed + self.latency_seconds + (self._jitter() if self._jitter else 0.0)
        self._last = max(self._last, arrival, self._behind._last if self._behind is not None else 0.0)
        if sent is not None:
            self._time.after(left - now, sent)

        def arrive() -> None:
            if self.open:
                deliver()

        self._time.after(self._last - now, arrive)
