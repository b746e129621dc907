"""The order in which programs advance and ops are issued: the core of the engine, without threads or networks.

The order is fixed by the plan, never by completion. The k-th collective that bucket b yields within a scope goes to
lane (scope, k), and only when every earlier bucket has issued its own k-th there, or has ended with fewer. So every
rank puts the same sequence on every process group, whatever arrives first.

On the decoupled schedule a program ends at its ``NextForward`` as far as this runner is concerned; a second runner
continues the rest, in an order of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.core.program.ops import Collective, NextForward, Paused, Program, Scope

Issue = Callable[[Collective, Scope, int, int], None]
"""(op, scope, round, bucket): start it; later call ``Runner.completed(bucket, result)``."""


class Runner:
    """The programs of one step. ``issue`` starts an op on its lane; ``ended`` hears of each bucket that has ended."""

    def __init__(
        self, size: int, issue: Issue, *, pause: bool = False, ended: Callable[[int], None] | None = None
    ) -> None:
        self._issue, self._pause, self._tell = issue, pause, ended
        self.paused: dict[int, Paused] = {}  # at their NextForward, unless they go on at once
        self._programs: list[Program | None] = [None] * size
        self._ended = [False] * size
        self._round: list[dict[Scope, int]] = [{} for _ in range(size)]
        self._front: dict[tuple[Scope, int], int] = {}
        self._held: dict[tuple[Scope, int], dict[int, Collective]] = {}
        self._runnable: list[tuple[int, int, Any]] = []
        self._count = 0
        self.left = size

    @classmethod
    def resume(cls, paused: Sequence[Paused], issue: Issue, ended: Callable[[int], None] | None = None) -> Runner:
        runner = cls(len(paused), issue, ended=ended)
        for place, waiting in enumerate(paused):
            runner._round[place] = dict(waiting.rounds)
            runner.start(place, waiting.program)
        return runner

    def grow(self, size: int) -> None:
        for _ in range(size - len(self._ended)):
            self._programs.append(None)
            self._ended.append(False)
            self._round.append({})
            self.left += 1

    def start(self, bucket: int, program: Program) -> None:
        self._programs[bucket] = program
        self.completed(bucket, None)

    def completed(self, bucket: int, result: Any) -> None:
        self._count += 1
        heapq.heappush(self._runnable, (bucket, self._count, result))

    @property
    def has_work(self) -> bool:
        return bool(self._runnable)

    @property
    def oldest(self) -> int:
        return self._runnable[0][0]

    def pump(self) -> None:
        bucket, _, value = heapq.heappop(self._runnable)
        program = self._programs[bucket]
        assert program is not None
        try:
            op = program.send(value)
            if self._pause and isinstance(op, NextForward):
                self.paused[bucket] = Paused(program, value, op, self._round[bucket])
                self._end(bucket)
                return
            while isinstance(op, NextForward):  # coupled schedule: the rest runs at once
                op = program.send(None)
        except StopIteration:
            self._end(bucket)
            return
        round_ = self._round[bucket].get(op.group, 0)
        self._round[bucket][op.group] = round_ + 1
        lane = (op.group, round_)
        self._held.setdefault(lane, {})[bucket] = op
        self._flush(lane)

    def _end(self, bucket: int) -> None:
        self._programs[bucket] = None
        self._ended[bucket] = True
        self.left -= 1
        for lane in list(self._held):
            self._flush(lane)
        if self._tell is not None:
            self._tell(bucket)

    def _flush(self, lane: tuple[Scope, int]) -> None:
        """Issue the ops that the plan's order allows on one lane."""
        scope, round_ = lane
        front, held = self._front.get(lane, 0), self._held[lane]
        while front < len(self._ended):
            if front in held:
                op = held.pop(front)
                front += 1
                self._front[lane] = front
                self._issue(op, scope, round_, front - 1)
            elif self._ended[front]:
                front += 1
            else:
                break
        self._front[lane] = front
