"""Messages whose tensor comes in pieces over other connections: whole again, and in order."""

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
    """Holds a message back until all of its pieces have come, whichever comes first, and others behind it.

    Used at both ends: by the server for the sums of one member, by a leader for the weights. No threads, no clocks.

    Args:
        pieces: k, how many a message has.
        ordered: nothing overtakes (one channel). Else messages without pieces pass those that wait for theirs, as
            control passes tensors on two channels.

    Attributes:
        until: when the message that all wait for must be whole, in the seconds of ``now``; None: none waits.
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
        """A message has come.

        Args:
            number: of its pieces, higher than those before it; None: it has none.
            seconds: that its pieces may take once nothing is before it.

        Returns:
            What may be delivered now, each with its pieces in order, or None.
        """
        if number is None and not self._ordered:
            return [(message, None)]
        self._queue.append(_Waiting(message, number, seconds))
        if len(self._queue) == 1:
            self.until = now + seconds
        return self._whole(now)

    def piece(self, number: int, index: int, piece: Any, now: float) -> list[tuple[Any, list[Any] | None]]:
        """A piece has come, before its message or after it.

        Raises:
            ValueError: it was there already.
        """
        held = self._pieces.setdefault(number, {})
        if number <= self._newest or index in held or not 0 <= index < self._count or len(self._pieces) > _MOST_OPEN:
            raise ValueError(f"piece {index} of message {number} came twice, or from nowhere")
        held[index] = piece
        return self._whole(now)

    def overdue(self, now: float) -> bool:
        """Whether pieces have not come in time."""
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
