"""What executors share: a failure in a program, and what is told of each exchange.

An exchange is told to a recording (``trace``), to the prices of plans (``ExchangeTimes``), and to ``torch.profiler``,
as a range ``thinwire::<phase>::<bucket>``. Phases are the kinds of ops, from issue to completion, and ``segment``: a
stretch of a method's own computation. (A profiler sees only the thread that started it, unless ``profile_all_threads``
is set.)
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from thinwire.core.program.ops import Program, Scope
from thinwire.predict.measure.kernels import Stopwatch
from thinwire.predict.timeline import Event

MakeProgram = Callable[[int], Program]
"""Bucket index -> its program; called in the thread that runs it, once the bucket's gradients are there."""
_MOST = 4096
_ENOUGH = 0.25  # share of the bytes above which exchanges that waited for the link stand for all
_nothing = nullcontext()


@dataclass
class Failure:
    error: BaseException
    bucket: int | None
    where: str


class Recorder:
    """The real timeline of some steps, on the simulator's lanes; on CUDA, when work was issued. Any thread may add."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._events: list[Event] = []
        self._marks: dict[str, float] = {}

    def now(self) -> float:
        return time.perf_counter() - self._began

    def add(self, name: str, lane: str, start: float, bucket: int | None = None, sent: int = 0) -> None:
        self._events.append(Event(name, lane, start, self.now() - start, bucket, sent))

    def forward_began(self, *_: Any) -> None:
        self._marks["forward"] = self.now()

    def forward_ended(self, *_: Any) -> None:
        if "forward" in self._marks:
            self.add("forward", "compute", self._marks.pop("forward"))
            self._marks["backward"] = self.now()

    def backward_ended(self) -> None:
        if "backward" in self._marks:
            self.add("backward", "compute", self._marks.pop("backward"))

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(sorted(self._events, key=lambda event: event.start_seconds))


class ExchangeTimes:
    """The last exchanges over all ranks that this rank issued; on a GPU, by the current stream. Any thread may add."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._seen: deque[tuple[Any, Any, int]] = deque(maxlen=_MOST)  # issued, done, bytes sent
        self.clear()

    def issued(self) -> Any:
        return self._stopwatch.mark()

    def add(self, issued: Any, sent: int) -> None:
        self._seen.append((issued, self._stopwatch.mark(), sent))

    def clear(self) -> None:
        self._seen.clear()
        self._start = self._stopwatch.mark()

    def totals(self) -> list[float]:
        """Return number, bytes and seconds, from the end of the one before: of those that waited, then of all."""
        queued, everything, before = [0.0] * 3, [0.0] * 3, 0.0
        self._stopwatch.settle()
        since = functools.partial(self._stopwatch.between, self._start)
        for done, issued, sent in sorted((since(done), since(issued), sent) for issued, done, sent in self._seen):
            row = (1.0, float(sent), max(0.0, done - max(issued, before)))
            for total in (everything, *([queued] if issued < before else [])):
                total[:] = [a + b for a, b in zip(total, row)]
            before = done
        return queued + everything


def typical(totals: Sequence[Sequence[float]], ranks: int) -> tuple[float, float] | None:
    """Return bytes and seconds of the mean exchange, as if it were an all-reduce, from each rank's totals; None: none.

    A late rank finds the others' bytes waiting, and an early rank waits for them. So exchanges count that were queued
    behind others, if there are enough of them, and else the mean over all ranks.
    """
    count, sent, seconds, *rest = (sum(column) for column in zip(*totals))
    if sent < _ENOUGH * rest[1]:
        count, sent, seconds = rest
    if not (count and sent and seconds > 0):
        return None
    return sent / count * ranks / (2 * (ranks - 1)), seconds / count


def profiling() -> bool:
    return bool(profiler._is_profiler_enabled)


def span(phase: str, bucket: int | None) -> AbstractContextManager[Any]:
    return profiler.record_function(f"thinwire::{phase}::{bucket}") if profiling() else _nothing


def issued(
    kind: str, scope: Scope, bucket: int, recorder: Recorder | None, watch: ExchangeTimes | None, *, spanned: bool
) -> list[Callable[[int], None]]:
    """Note that an exchange is issued. Return what to call with the bytes sent, from any thread, when it has ended."""
    ends: list[Callable[[int], None]] = []
    if watch is not None and scope is Scope.WORLD:
        ends.append(partial(watch.add, watch.issued()))
    if recorder is not None:
        start, told = recorder.now(), recorder
        ends.append(lambda sent: told.add(kind, f"link {scope.value}", start, bucket, sent))
    if profiling() and not spanned:
        over: torch.futures.Future[None] = torch.futures.Future()
        with profiler.record_function(f"thinwire::{kind}::{bucket}") as range_:
            range_._call_end_callbacks_on_future(over)
        ends.append(lambda sent: over.set_result(None))
    return ends
