"""How long the exchanges of real steps take: what is known of a network before it has been probed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

_MOST = 4096
_ENOUGH = 0.25  # share of the bytes above which exchanges that waited for the link stand for all


class ExchangeWatch:
    """The last exchanges over all ranks that this rank has issued. Several threads may add at once."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=_MOST)  # done, issued, bytes sent

    def add(self, issued: float, sent: int) -> None:
        """Record that an exchange has completed; ``issued``: when it was issued, in ``time.perf_counter``'s seconds."""
        self._seen.append((time.perf_counter(), issued, sent))

    def clear(self) -> None:
        """Forget what was seen so far."""
        self._seen.clear()

    def totals(self) -> list[float]:
        """Return number, bytes sent and seconds: first of exchanges that found the link busy, then of all.

        The time of one that had to wait counts from the end of the one before.
        """
        queued, everything, before = [0.0] * 3, [0.0] * 3, 0.0
        for done, issued, sent in sorted(self._seen):
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
