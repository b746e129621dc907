"""How long the exchanges of real steps take: what is known of a network before anybody has probed it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

_MOST = 4096
_ENOUGH = 0.25  # of the bytes, so that exchanges that had to wait for the link speak for all


class ExchangeWatch:
    """The last exchanges over all ranks that this one has issued; threads may add at once."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=_MOST)  # done, issued, bytes sent

    def add(self, issued: float, sent: int) -> None:
        """An exchange has completed that was issued at that moment, in ``time.perf_counter``'s seconds."""
        self._seen.append((time.perf_counter(), issued, sent))

    def clear(self) -> None:
        """Forget what was seen so far."""
        self._seen.clear()

    def totals(self) -> list[float]:
        """Number, bytes sent and seconds: first of exchanges that found the link busy, then of all.

        One that had to wait is counted from the end of the one before.
        """
        queued, everything, before = [0.0] * 3, [0.0] * 3, 0.0
        for done, issued, sent in sorted(self._seen):
            row = (1.0, float(sent), max(0.0, done - max(issued, before)))
            for total in (everything, *([queued] if issued < before else [])):
                total[:] = [a + b for a, b in zip(total, row)]
            before = done
        return queued + everything


def typical(totals: Sequence[Sequence[float]], ranks: int) -> tuple[float, float] | None:
    """Bytes and seconds of the mean exchange, as if it were an all-reduce; None: there was none.

    Who is late finds the others' bytes waiting, and who is early waits for them. So exchanges count that were queued
    behind others, if there are enough, and else the mean over all ranks.

    Args:
        totals: of each rank, as :meth:`ExchangeWatch.totals` gives them.
        ranks: that exchange.
    """
    count, sent, seconds, *rest = (sum(column) for column in zip(*totals))
    if sent < _ENOUGH * rest[1]:
        count, sent, seconds = rest
    if not (count and sent and seconds > 0):
        return None
    return sent / count * ranks / (2 * (ranks - 1)), seconds / count
