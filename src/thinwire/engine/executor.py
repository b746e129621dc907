"""Two executors under one runner: a communicator thread (Gloo), or the host issuing on a side stream (NCCL)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.collectives.lanes import Lanes
from thinwire.collectives.ledger import Ledger
from thinwire.collectives.transport import Pending, issue
from thinwire.engine.runner import Runner
from thinwire.program.ops import Collective, NextForward, Program, Scope

MakeProgram = Callable[[int], Program]
"""Bucket index -> its program; called where the program will run, once the bucket's gradients are there."""


@dataclass
class Failure:
    """What went wrong, and where."""

    error: BaseException
    bucket: int | None
    where: str


class Wire:
    """Lanes and ledger together: issues ops and notes them."""

    def __init__(self, lanes: Lanes, ledger: Ledger, note: Callable[[Collective, Scope, int, int], None]) -> None:
        self.lanes, self.ledger, self._note = lanes, ledger, note

    def issue(self, op: Collective, scope: Scope, round_: int, bucket: int, purpose: str = "bucket") -> Pending:
        """Start an op on its lane."""
        lane = self.lanes.get(purpose, scope, round_)
        self.ledger.record(op, lane.size)
        if purpose == "bucket":
            self._note(op, scope, round_, bucket)
        return issue(op, lane, tag=bucket)


class ThreadExecutor:
    """A communicator thread advances the programs while autograd goes on in the main thread."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._epoch = 0
        self.failure: Failure | None = None
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._loop, name="thinwire-communicator", daemon=True)
        self._thread.start()

    def begin(self, size: int | None, make: MakeProgram, failed: Callable[[], None] | None = None) -> None:
        """Open a step of ``size`` buckets; None: until one is ready as the last. ``failed`` is called by the thread."""
        self._epoch += 1
        self.failure = None
        self._finished.clear()
        self._events.put(("begin", self._epoch, size, make, failed))

    def ready(self, bucket: int, last: bool = False) -> None:
        """The bucket's gradients are complete (in the current stream's order on CUDA)."""
        event = None
        if self._cuda is not None:
            event = torch.cuda.Event()
            event.record()
        self._events.put(("ready", self._epoch, bucket, event, last))

    def finish(self) -> Failure | None:
        """Block until all programs of the step have ended, or one failed."""
        self._finished.wait()
        if self._cuda is not None:
            torch.cuda.current_stream().wait_stream(self._cuda)
        return self.failure

    def close(self) -> None:
        """End the thread."""
        self._events.put(("stop", 0))
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self._cuda) if self._cuda is not None else nullcontext():
            while self._step():
                pass

    def _step(self) -> bool:
        """One step from ``begin`` to its end. False when asked to stop."""
        event = self._events.get()
        while event[0] != "begin":  # stragglers of a failed step
            if event[0] == "stop":
                return False
            event = self._events.get()
        _, epoch, size, make, failed = event
        more = size is None
        current: int | None = None
        where = "start"

        def start(op: Collective, scope: Scope, round_: int, bucket: int) -> None:
            nonlocal where, current
            current, where = bucket, f"{type(op).__name__} on lane {scope.value}/{round_}"
            pending = self._wire.issue(op, scope, round_, bucket)
            label = where
            pending.on_done(lambda: self._events.put(("done", epoch, bucket, pending, label)))

        runner = Runner(size or 0, start)
        try:
            while runner.left or more:
                # Take all that has happened before choosing what to advance: the oldest bucket goes first.
                while self._events.qsize() or not runner.has_work:
                    event = self._events.get()
                    if event[0] == "stop":
                        return False
                    if event[1] == epoch:
                        if more and event[0] == "ready":
                            runner.grow(event[2] + 1)
                            more = not event[4]
                        current, where = event[2], event[4] if event[0] == "done" else "start"
                        self._take(runner, event, make)
                runner.pump()
        except BaseException as error:
            self.failure = Failure(error, current, where)
        self._finished.set()
        if self.failure is not None and failed is not None:
            failed()
        return True

    def _take(self, runner: Runner, event: tuple[Any, ...], make: MakeProgram) -> None:
        if event[0] == "ready":
            if event[3] is not None:
                torch.cuda.current_stream().wait_event(event[3])
            runner.start(event[2], make(event[2]))
        else:
            runner.completed(event[2], event[3].wait())


class StreamExecutor:
    """The host issues each program whole, in plan order, on a side stream, and never blocks (NCCL)."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: dict[int, Any] = {}
        self._next = 0
        self._make: MakeProgram | None = None
        self.failure: Failure | None = None

    def begin(self, size: int | None, make: MakeProgram, failed: Callable[[], None] | None = None) -> None:
        """Open a step. What failed is known to the host when ``ready`` returns, so nobody is called."""
        self._ready.clear()
        self._next, self._make, self.failure = 0, make, None

    def ready(self, bucket: int, last: bool = False) -> None:
        """The bucket's gradients are complete in the current stream's order: run all buckets whose turn has come."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record()
        self._ready[bucket] = event
        while self._next in self._ready and self.failure is None:
            self._run(self._next, self._ready[self._next])
            self._next += 1

    def _run(self, bucket: int, event: Any) -> None:
        assert self._make is not None
        where = "start"
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                if self._stream is not None:
                    self._stream.wait_event(event)
                program = self._make(bucket)
                value: Any = None
                while True:
                    try:
                        op = program.send(value)
                    except StopIteration:
                        return
                    value = None
                    if not isinstance(op, NextForward):
                        where = f"{type(op).__name__} on lane {op.group.value}/0"
                        value = self._wire.issue(op, op.group, 0, bucket).wait()
        except Exception as error:
            self.failure = Failure(error, bucket, where)

    def finish(self) -> Failure | None:
        """Order the current stream after everything that was issued."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self.failure

    def close(self) -> None:
        """Nothing to end."""


Executor = ThreadExecutor | StreamExecutor
