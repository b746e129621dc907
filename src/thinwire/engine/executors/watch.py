"""How long the exchanges of real steps take: what is known of a network before it has been probed."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from thinwire.predict.measure.kernels import Stopwatch

_MOST = 4096
_ENOUGH = 0.25  # share of the bytes above which exchanges that waited for the link stand for all


class ExchangeWatch:
    """The last exchanges over all ranks that this rank has issued. Several threads may add at once.

    Args:
        stopwatch: of the device. On a GPU, moments are those of the current stream.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._seen: deque[tuple[Any, Any, int]] = deque(maxlen=_MOST)  # issued, done, bytes sent
        self.clear()

    def issued(self) -> Any:
        """Return this moment, in which an exchange is issued, for ``add``."""
        return self._stopwatch.mark()

    def add(self, issued: Any, sent: int) -> None:
        """Record that an exchange has completed."""
        self._seen.append((issued, self._stopwatch.mark(), sent))

    def clear(self) -> None:
        """Forget what was seen so far."""
        self._seen.clear()
        self._start = self._stopwatch.mark()

    def totals(self) -> list[float]:
        """Return number, bytes sent and seconds: first of exchanges that found the link busy, then of all.

        The time of one that had to wait counts from the end of the one before.
        """
        queued, everything, before = [0.0] * 3, [0.0] * 3, 0.0
        self._stopwatch.settle()
        since = functools.partial(self._stopwatch.between, self._start)
        for done, issued, sent in sorted((since(done), since(issued), sent) for issued, done, sent in self._seen):
            row = (1.0, float(sent), max(0.0, done - max(issued, before)))
            for total in (everything, *([queued] if issued < before else [])):
                total[:] = [a + b for a, b in zip(total, row)]
            before = done
        return queued + everything


def typical(totals: Sequence[Sequence[float]], ranks: int) -> tuple[float, float] | None:
    """Return bytes and seconds of the mean exchange, as if it were an all-reduce; None: there was none.

    A late rank finds the others' bytes waiting, and an early rank waits for them. So exchanges count that were queued
    behind others, if there are enough of them, and else the mean over all ranks.

    Args:
        totals: of each rank, as :meth:`ExchangeWatch.totals` gives them.
        ranks: the number of ranks that exchange.
    """
    count, sent, seconds, *rest = (sum(column) for column in zip(*totals))
    if sent < _ENOUGH * rest[1]:
        count, sent, seconds = rest
    if not (count and sent and seconds > 0):
        return None
    return sent / count * ranks / (2 * (ranks - 1)), seconds / count
