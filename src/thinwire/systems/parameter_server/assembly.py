"""Reassemble messages whose tensor comes in pieces over other connections, and keep them in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

_MOST_OPEN = 1024


@dataclass(frozen=True)
class _Waiting:
    message: Any
    number: int | None
    seconds: float


class Assembly:
    """Holds a message, and those behind it, until all of its pieces have come; pieces may come before the message.

    Used on both sides: by the server for one member's sums, by a leader for the weights. It has no threads and no
    clock.

    Args:
        pieces: k, the pieces of a message.
        ordered: True: no message overtakes another (one channel). False: messages without pieces overtake those that
            wait for pieces, as control messages overtake tensors on two channels.

    Attributes:
        until: when the first waiting message must be complete, on the clock of ``now`` (seconds); None: none waits.
    """

    def __init__(self, pieces: int, ordered: bool) -> None:
        self._count, self._ordered = pieces, ordered
        self._queue: deque[_Waiting] = deque()
        self._pieces: dict[int, dict[int, Any]] = {}
        self._newest = -1
        self.until: float | None = None

    def message(
        self, message: Any, number: int | None, seconds: float, now: float
    ) -> list[tuple[Any, list[Any] | None]]:
        """Note a message that has come.

        Args:
            number: of its pieces, higher than that of earlier messages; None: it has no pieces.
            seconds: the time its pieces may take once no message is before it.

        Returns:
            The messages that can be delivered now, each with its pieces in order, or with None if it has none.
        """
        if number is None and not self._ordered:
            return [(message, None)]
        self._queue.append(_Waiting(message, number, seconds))
        if len(self._queue) == 1:
            self.until = now + seconds
        return self._whole(now)

    def piece(self, number: int, index: int, piece: Any, now: float) -> list[tuple[Any, list[Any] | None]]:
        """Note a piece, which may come before its message; return what can be delivered, as :meth:`message` does.

        Raises:
            ValueError: this piece came before, its index is out of range, or too many messages are incomplete.
        """
        held = self._pieces.setdefault(number, {})
        if number <= self._newest or index in held or not 0 <= index < self._count or len(self._pieces) > _MOST_OPEN:
            raise ValueError(f"piece {index} of message {number} arrived twice or unexpectedly")
        held[index] = piece
        return self._whole(now)

    def overdue(self, now: float) -> bool:
        """Return whether pieces have not come in time."""
        return self.until is not None and now > self.until

    def _whole(self, now: float) -> list[tuple[Any, list[Any] | None]]:
        out: list[tuple[Any, list[Any] | None]] = []
        while self._queue:
            head = self._queue[0]
            if head.number is None:
                out.append((head.message, None))
            elif len(self._pieces.get(head.number, ())) == self._count:
                held = self._pieces.pop(head.number)
                out.append((head.message, [held[index] for index in range(self._count)]))
                self._newest = head.number
            else:
                break
            self._queue.popleft()
            self.until = now + self._queue[0].seconds if self._queue else None
        return out
