"""One step of one rank as discrete events: a compute stream, a worker for the methods, links that serve in order."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from thinwire.core.program import Scope
from thinwire.core.virtual_time import Line, VirtualTime
from thinwire.predict.timeline.programs import Hop, ProgramPart
from thinwire.predict.timeline.result import COMPUTE, EXCHANGE_CPU, METHOD, Event

Lane = tuple[Scope | None, int]
_ISSUED: Lane = (None, 0)
"""The single lane of all exchanges, if one program's follow another's."""


class Wave:
    """Programs that run together. A position is an index in their order."""

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
        if self._streams is None:
            return [position]
        self._waiting.add(position)
        return self._beginners()

    def segment(self, position: int) -> float:
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


@dataclass(frozen=True)
class ComputeTask:
    """A piece of forward, backward or optimizer; the tasks of a step run in order.

    ``needs``: the deferred program that must have ended before; ``completes``: the one that may start afterwards;
    ``last``: it waits for all programs of the step.
    """

    name: str
    seconds: float
    bucket: int | None = None
    needs: int | None = None
    completes: int | None = None
    last: bool = False


@dataclass(frozen=True)
class _Job:
    """Work for the worker: a program's next segment, or (``wave`` None) the CPU time of an exchange."""

    wave: Wave | None
    position: int
    seconds: float
    bucket: int


class Machine(VirtualTime):
    """Simulates one step. Parts of the previous one (``deferred``) start at once; ``current`` ones after their tasks.

    ``shared``: the worker has no core of its own: while it works, the compute stream is paused. ``streams``: side
    streams on which programs alternate (NCCL); None: each program runs when it is ready.
    """

    def __init__(
        self,
        tasks: Sequence[ComputeTask],
        deferred: list[ProgramPart],
        current: list[ProgramPart],
        *,
        shared: bool,
        streams: int | None,
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._tasks = deque(tasks)
        self._deferred, self._current = Wave(deferred, streams=streams), Wave(current, streams=streams)
        self._shared = shared
        self._task: ComputeTask | None = None
        self._left = self._since = 0.0
        self._running = False  # False while the task is paused
        self._turn = 0  # number of the current run; an end scheduled for an earlier run is ignored
        self._jobs: list[tuple[bool, int, int, _Job]] = []
        self._job: _Job | None = None
        self._queued = 0
        self._links: defaultdict[str, Line] = defaultdict(Line)

    def run(self) -> float:
        """Process all events. Return the seconds of the step."""
        for position in range(len(self._deferred.parts)):
            self._ready(self._deferred, position)
        self._dispatch()
        while self.next[0] < math.inf:
            self.step()
            if self.next > (self.now, 0):  # everything due now, before anything new is chosen
                self._dispatch()
        stuck = self._tasks or self._current.left or self._deferred.left
        assert not stuck, "the step does not end"
        return self.now

    def _dispatch(self) -> None:
        while self._jobs and self._job is None:
            self._work(heapq.heappop(self._jobs)[-1])
        if self._job is None or not self._shared:
            self._resume()

    # --- the compute stream --------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if self._task is None and self._tasks and self._may_start(self._tasks[0]):
            self._task = self._tasks.popleft()
            self._left = self._task.seconds
        if self._task is not None and not self._running:
            self._since = self.now
            self._turn += 1
            self._running = True
            self.after(self._left, partial(self._end_task, self._turn))

    def _may_start(self, task: ComputeTask) -> bool:
        if task.needs is not None and not self._deferred.ended[task.needs]:
            return False
        return not (task.last and self._current.left)

    def _pause(self) -> None:
        if self._shared and self._task is not None and self._running:
            self._note_task(self._task)
            self._left = max(0.0, self._left - (self.now - self._since))
            self._running = False

    def _end_task(self, turn: int) -> None:
        task = self._task
        if task is None or turn != self._turn or not self._running:  # it was paused meanwhile
            return
        self._note_task(task)
        self._task, self._running = None, False
        if task.completes is not None:
            self._ready(self._current, task.completes)

    def _note_task(self, task: ComputeTask) -> None:
        if self.now > self._since:
            self.events.append(Event(task.name, COMPUTE, self._since, self.now - self._since, task.bucket))

    # --- the worker ----------------------------------------------------------------------------------------------

    def _ready(self, wave: Wave, position: int) -> None:
        for first in wave.ready(position):
            self._queue_segment(wave, first)

    def _queue_segment(self, wave: Wave, position: int) -> None:
        self._queue(_Job(wave, position, wave.segment(position), wave.parts[position].bucket))

    def _queue(self, job: _Job) -> None:
        """Queue a job. The oldest program goes first; CPU time of exchanges cannot wait."""
        self._queued += 1
        heapq.heappush(self._jobs, (job.wave is not None, job.position, self._queued, job))

    def _work(self, job: _Job) -> None:
        if job.seconds == 0:
            self._worked(job)
            return
        self._pause()
        self._job = job
        name = EXCHANGE_CPU if job.wave is None else "segment"
        self.events.append(Event(name, METHOD, self.now, job.seconds, job.bucket))
        self.after(job.seconds, partial(self._worked, job))

    def _worked(self, job: _Job) -> None:
        self._job = None
        if job.wave is None:
            return
        issued, beginners = job.wave.advance(job.position)
        for position, hop in issued:
            self._send(job.wave, position, hop)
        for first in beginners:
            self._queue_segment(job.wave, first)

    # --- the links -----------------------------------------------------------------------------------------------

    def _send(self, wave: Wave, position: int, hop: Hop) -> None:
        bucket, link = wave.parts[position].bucket, self._links[hop.link]
        start = max(self.now, link.free_at)
        self.events.append(Event(hop.name, f"link {hop.scope.value}", start, hop.seconds, bucket, hop.sent_bytes))
        passed = link.carry(start, hop.seconds - hop.travel_seconds)
        self.at(passed + hop.travel_seconds, partial(self._queue_segment, wave, position))
        if self._shared and hop.cpu_seconds:
            self.at(start, partial(self._queue, _Job(None, position, hop.cpu_seconds, bucket)), 1)
