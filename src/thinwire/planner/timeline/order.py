"""Which exchange may be issued when: the engine's rule, for programs in a given order.

The k-th exchange that a program issues within a scope goes to lane (scope, k). Within a lane, the order of the programs
holds: one waits until all before it have issued theirs there, or have ended with fewer. ``serial=True`` is the rule of
a side stream (NCCL): a program begins when the one before it has ended.
"""

from __future__ import annotations

from collections import Counter

from thinwire.planner.timeline.programs import Hop, Part
from thinwire.program import Scope

Lane = tuple[Scope, int]


class Wave:
    """Programs that run together. A position counts in their order.

    Args:
        parts: the programs, in order.
        serial: see above.
    """

    def __init__(self, parts: list[Part], *, serial: bool) -> None:
        self.parts = parts
        self.left = len(parts)
        self.ended = [False] * len(parts)
        self._serial = serial
        self._next = [0] * len(parts)
        self._rounds: list[Counter[Scope]] = [Counter() for _ in parts]
        self._front: Counter[Lane] = Counter()
        self._held: dict[Lane, dict[int, Hop]] = {}
        self._waiting: set[int] = set()
        self._begun = 0

    def ready(self, position: int) -> list[int]:
        """The gradients of a program are there. Returns the positions that may begin."""
        if not self._serial:
            return [position]
        self._waiting.add(position)
        return self._beginners()

    def segment(self, position: int) -> float:
        """Seconds of the segment that a program stands before."""
        return self.parts[position].segments[self._next[position]]

    def advance(self, position: int) -> tuple[list[tuple[int, Hop]], list[int]]:
        """The segment is done. Returns the exchanges that may be issued, and the positions that may begin."""
        part, number = self.parts[position], self._next[position]
        self._next[position] += 1
        if number == len(part.hops):
            self.ended[position] = True
            self.left -= 1
            issued = [pair for lane in list(self._held) for pair in self._flush(lane)]
            return issued, self._beginners()
        hop = part.hops[number]
        lane = (hop.scope, self._rounds[position][hop.scope])
        self._rounds[position][hop.scope] += 1
        self._held.setdefault(lane, {})[position] = hop
        return self._flush(lane), []

    def _beginners(self) -> list[int]:
        """At most one: the next in order, if it is ready and all before it have ended."""
        next_ = self._begun
        if next_ in self._waiting and (next_ == 0 or self.ended[next_ - 1]):
            self._waiting.remove(next_)
            self._begun += 1
            return [next_]
        return []

    def _flush(self, lane: Lane) -> list[tuple[int, Hop]]:
        held, front, issued = self._held[lane], self._front[lane], []
        while front < len(self.parts) and (front in held or self.ended[front]):
            if front in held:
                issued.append((front, held.pop(front)))
            front += 1
        self._front[lane] = front
        return issued
