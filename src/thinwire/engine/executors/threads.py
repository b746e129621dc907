"""The executor for Gloo: a communicator thread advances the programs while autograd continues in the main thread.

*Light* programs, which consist of a copy and one exchange, do without the thread: the thread that finds the bucket
ready starts them, and the thread that waits for the end of the step completes them. Handing one over would cost more
than the copy. If every core has a rank, all programs with one exchange run this way: a communicator thread would only
compete with backward for the core.

On the decoupled schedule a step has two halves: ``begin`` to ``finish``, then ``resume``, and ``wait`` for each bucket.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd import profiler

from thinwire.core.collectives.exchange import ByteCounter, LanePool, Pending, issue
from thinwire.core.program.ops import Collective, Paused, Scope, own_modes
from thinwire.engine.executors.events import ExchangeTimes, Failure, MakeProgram, Recorder, issued, span
from thinwire.engine.executors.runner import Runner
from thinwire.engine.ranks.agreement import OrderCheck


class Issuer:
    """Issues ops on the lanes of one purpose, and records them; ``order``: for the comparison between ranks."""

    def __init__(
        self, lanes: LanePool, ledger: ByteCounter, purpose: str = "bucket", order: OrderCheck | None = None
    ) -> None:
        self.lanes, self.ledger, self.purpose, self.order = lanes, ledger, purpose, order

    def issue(self, op: Collective, scope: Scope, round_: int, bucket: int) -> Pending:
        lane = self.lanes.get(self.purpose, scope, round_)
        self.ledger.record(op, lane.size)
        if self.order is not None:
            self.order.note(op, scope, round_, bucket)
        return issue(op, lane, tag=bucket)


@dataclass(eq=False)
class _Step:
    """A step under way; in a second half, ``order`` gives the bucket of each place in the runner."""

    make: MakeProgram
    failed: Callable[[], None] | None
    more: bool  # further buckets may come
    runner: Runner
    inline: set[int] = field(default_factory=set)
    to_complete: queue.SimpleQueue[_Event | None] = field(default_factory=queue.SimpleQueue)  # for finish(); None: end
    bucket: int | None = None  # like ``where``, what it was last doing, for error messages
    where: str = "start"
    order: Sequence[int] | None = None
    over: dict[int, threading.Event] = field(default_factory=dict)  # for the end of each place

    def number(self, place: int | None) -> int | None:
        return place if self.order is None or place is None else self.order[place]


@dataclass(eq=False, slots=True)
class _Event:
    """A bucket is ready (``pending`` is None), or its op has completed."""

    step: _Step
    bucket: int
    pending: Pending | None = None
    last: bool = False
    where: str = "start"


@contextmanager
def _as_in_the_thread() -> Iterator[None]:
    """Give programs that run in the user's thread the modes of the communicator thread."""
    with own_modes(), torch.no_grad():
        yield


class ThreadExecutor:
    """Runs each step's programs under one lock: in the communicator thread or, if inline, in the caller's."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the current step and its runner
        self._step: _Step | None = None  # under way
        self._begun: _Step | None = None  # under way or ended
        self._second: _Step | None = None  # likewise, a second half
        self.failure: Failure | None = None
        self.recorder: Recorder | None = None
        self.watch: ExchangeTimes | None = None
        self._thread = threading.Thread(target=self._loop, name="thinwire-communicator", daemon=True)
        self._thread.start()

    def begin(
        self, size: int | None, make: MakeProgram, failed: Callable[[], None] | None = None, *, pause: bool = False
    ) -> None:
        """Open a step of ``size`` buckets; None: until one is the last. ``pause``: keep the rest for ``resume``."""
        with self._lock:
            self.failure = None
            runner = Runner(size or 0, self._issue, pause=pause)
            step = _Step(make, failed, size is None, runner)
            self._step = self._begun = step

    def ready(self, bucket: int, last: bool = False, inline: bool = False) -> bool:
        """Start a bucket's program, ``inline`` if it has one exchange. Return whether it has begun in this thread."""
        step = self._step
        if step is None:  # the step has failed; finish() reports it
            return False
        event = _Event(step, bucket, None, last)
        if inline and self._lock.acquire(blocking=False):
            step.inline.add(bucket)
            try:
                with _as_in_the_thread():
                    self._advance([event], alone=True)
            finally:
                self._lock.release()
            return self.failure is None
        self._events.put(event)
        return False

    def finish(self) -> Failure | None:
        step = self._begun
        assert step is not None
        self._complete(step)
        return self.failure

    def _complete(self, step: _Step, place: int | None = None) -> None:
        """Complete inline programs until the step has ended, or the bucket at ``place`` has."""
        while (event := step.to_complete.get()) is not None:
            assert event.pending is not None
            error: BaseException | None = None
            try:
                event.pending.block()
            except RuntimeError as caught:
                error = caught
            with self._lock, _as_in_the_thread():
                if error is not None:
                    self._fail(step, error, step.number(event.bucket), event.where)
                else:
                    self._advance([event], alone=True)
            if place is not None and step.over[place].is_set():
                return

    @property
    def paused(self) -> Mapping[int, Paused]:
        """The programs that wait for the next forward, by bucket; once the first half has ended."""
        assert self._begun is not None
        return self._begun.runner.paused

    def resume(self, order: Sequence[int], inline: Sequence[int]) -> None:
        """Continue the paused programs, issuing in this order; who waits for those ``inline`` completes them."""
        assert self._begun is not None
        with self._lock:
            ended = {place: threading.Event() for place in range(len(order))}
            runner = Runner.resume([self.paused[b] for b in order], self._issue, lambda place: ended[place].set())
            step = _Step(self._begun.make, None, False, runner, order=tuple(order), over=ended)
            step.inline.update(place for place, bucket in enumerate(order) if bucket in inline)
            self._second = step
            self._step = step if order else None
            if order:
                with _as_in_the_thread():
                    self._advance([], alone=True)

    def wait(self, bucket: int) -> Failure | None:
        step = self._second
        assert step is not None
        assert step.order is not None
        place = step.order.index(bucket)
        if place in step.inline and not step.over[place].is_set():
            self._complete(step, place)
        step.over[place].wait()
        return self.failure

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        with torch.no_grad():
            while (event := self._events.get()) is not None:
                with self._lock:
                    self._advance([event])

    def _advance(self, events: list[_Event], alone: bool = False) -> None:
        """Process events and advance programs, the oldest bucket first; ``alone``: no later events. Needs the lock."""
        step = self._step
        if step is None:
            return
        try:
            while events or step.runner.has_work:
                for event in events:
                    if event.step is step:  # else a late event of a failed step
                        self._take(step, event)
                if step.runner.has_work:
                    self._pump(step)
                events = [] if alone else self._waiting()
        except BaseException as error:
            self._fail(step, error, step.bucket, step.where)
            if alone and not isinstance(error, Exception):  # of the script's signal handler: it is for the script
                raise
            return
        if not step.runner.left and not step.more:
            self._step = None
            step.to_complete.put(None)

    def _fail(self, step: _Step, error: BaseException, bucket: int | None, where: str) -> None:
        if self._step is not step:  # it has already failed
            return
        self.failure = Failure(error, bucket, where)
        self._step = None
        step.to_complete.put(None)
        for over in step.over.values():
            over.set()
        if step.failed is not None:
            step.failed()

    def _pump(self, step: _Step) -> None:
        recorder = self.recorder
        if recorder is None and not profiler._is_profiler_enabled:
            step.runner.pump()
            return
        bucket = step.number(step.runner.oldest)
        start = recorder.now() if recorder else 0.0
        with span("segment", bucket):
            step.runner.pump()
        if recorder:
            recorder.add("segment", "method", start, bucket)

    def _waiting(self) -> list[_Event]:
        """Return the events that are queued, without waiting; a request to stop stays in the queue."""
        events: list[_Event] = []
        while self._events.qsize():
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if event is None:
                self._events.put(None)
                break
            events.append(event)
        return events

    def _take(self, step: _Step, event: _Event) -> None:
        step.bucket, step.where = step.number(event.bucket), event.where
        if event.pending is not None:
            step.runner.completed(event.bucket, event.pending.wait())
            return
        if step.more:
            step.runner.grow(event.bucket + 1)
            step.more = not event.last
        step.runner.start(event.bucket, step.make(event.bucket))

    def _issue(self, op: Collective, scope: Scope, round_: int, place: int) -> None:
        step = self._step  # if the runner knew its step, they would form a cycle, left to the garbage collector
        assert step is not None
        where = f"{type(op).__name__} on lane {scope.value}/{round_}"
        bucket = step.number(place)
        assert bucket is not None
        step.bucket, step.where = bucket, where
        ends: list[Callable[[int], None]] = []
        if self.recorder is not None or self.watch is not None or profiler._is_profiler_enabled:
            ends = issued(type(op).__name__, scope, bucket, self.recorder, self.watch, spanned=False)
        before = self._issuer.ledger.total if ends else 0
        pending = self._issuer.issue(op, scope, round_, bucket)
        event = _Event(step, place, pending, where=where)
        queue_ = step.to_complete if place in step.inline else self._events
        if not ends and place in step.inline:
            queue_.put(event)
            return
        sent = self._issuer.ledger.total - before if ends else 0

        def done() -> None:
            for end in ends:
                end(sent)
            queue_.put(event)

        pending.on_done(done)
