"""Which exchange may be issued when: the engine's rule, for programs in a given order.

The k-th exchange that a program issues within a scope goes to lane (scope, k). Within a lane, programs issue in order:
one waits until all programs before it have issued their exchange in that lane, or have ended with fewer. With
``streams``, the rule is that of alternating side streams (NCCL): a program begins when the previous one on its stream
has ended, and all its exchanges come after all those of the previous program, in the order in which the host issues
them.
"""

from __future__ import annotations

from collections import Counter

from thinwire.core.program import Scope
from thinwire.predict.timeline.programs import Hop, ProgramPart

Lane = tuple[Scope | None, int]
_ISSUED: Lane = (None, 0)
"""The single lane of all exchanges, if one program's follow another's."""


class Wave:
    """Programs that run together. A position is an index in their order.

    Args:
        parts: the programs, in order.
        streams: see above; None: as many streams as programs.
    """

    def __init__(self, parts: list[ProgramPart], *, streams: int | None) -> None:
        self.parts = parts
        self.left = len(parts)
        self.ended = [False] * len(parts)
        self._streams = streams
        self._next = [0] * len(parts)
        self._rounds: list[Counter[Scope]] = [Counter() for _ in parts]
        self._front: Counter[Lane] = Counter()
        self._held: dict[Lane, dict[int, Hop]] = {}
        self._waiting: set[int] = set()
        self._begun = 0

    def ready(self, position: int) -> list[int]:
        """Note that the gradients of a program are ready. Return the positions that may begin."""
        if self._streams is None:
            return [position]
        self._waiting.add(position)
        return self._beginners()

    def segment(self, position: int) -> float:
        """Return the seconds of a program's next segment."""
        return self.parts[position].segments[self._next[position]]

    def advance(self, position: int) -> tuple[list[tuple[int, Hop]], list[int]]:
        """Note that the segment is done. Return the exchanges that may be issued, and the positions that may begin."""
        part, number = self.parts[position], self._next[position]
        self._next[position] += 1
        if number == len(part.hops):
            self.ended[position] = True
            self.left -= 1
            if self._streams is not None:
                return self._in_turn(), self._beginners()
            return [pair for lane in list(self._held) for pair in self._flush(lane)], []
        hop = part.hops[number]
        if self._streams is not None:
            self._held.setdefault(_ISSUED, {})[position] = hop
            return self._in_turn(), []
        lane = (hop.scope, self._rounds[position][hop.scope])
        self._rounds[position][hop.scope] += 1
        self._held.setdefault(lane, {})[position] = hop
        return self._flush(lane), []

    def _beginners(self) -> list[int]:
        """Return the next programs in order, as far as they are ready and their streams are free."""
        assert self._streams is not None
        found = []
        while self._begun in self._waiting and (self._begun < self._streams or self.ended[self._begun - self._streams]):
            self._waiting.remove(self._begun)
            found.append(self._begun)
            self._begun += 1
        return found

    def _in_turn(self) -> list[tuple[int, Hop]]:
        """Return the exchanges that the host could have issued by now, program after program."""
        held, front, issued = self._held.setdefault(_ISSUED, {}), self._front[_ISSUED], []
        while front < len(self.parts):
            if front in held:
                issued.append((front, held.pop(front)))
            if self._next[front] < len(self.parts[front].hops):
                break
            front += 1
        self._front[_ISSUED] = front
        return issued

    def _flush(self, lane: Lane) -> list[tuple[int, Hop]]:
        held, front, issued = self._held[lane], self._front[lane], []
        while front < len(self.parts) and (front in held or self.ended[front]):
            if front in held:
                issued.append((front, held.pop(front)))
            front += 1
        self._front[lane] = front
        return issued
