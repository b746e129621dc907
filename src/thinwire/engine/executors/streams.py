"""The executor for NCCL: the host issues programs whole, alternating between side streams, and never blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program.ops import NextForward, Op, Paused, Program, drive
from thinwire.core.program.plan import SIDE_STREAMS
from thinwire.engine.executors.events import ExchangeTimes, Failure, MakeProgram, Recorder, issued, profiling, span
from thinwire.engine.executors.threads import Issuer


def read_here(x: Tensor) -> None:
    """Tell the allocator that this stream reads another's memory: it is reused after all that was issued here."""
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))


class _Segments:
    """A program, each of whose segments is a range under a profiler."""

    def __init__(self, program: Program, bucket: int) -> None:
        self._program, self._bucket = program, bucket

    def send(self, value: Any) -> Op:
        with span("segment", self._bucket):
            return self._program.send(value)


class StreamExecutor:
    """The executor of NCCL's lanes; see :class:`~thinwire.engine.executors.threads.ThreadExecutor` for its members."""

    def __init__(self, issuer: Issuer, device: torch.device) -> None:
        self._issuer = issuer
        self._streams = [torch.cuda.Stream(device) for _ in range(SIDE_STREAMS)] if device.type == "cuda" else []
        self._arrived: dict[int, dict[Any, None]] = {}  # by bucket, the streams that its gradients were made on
        self._ready: dict[int, list[Any]] = {}
        self._next = 0
        self._make: MakeProgram | None = None
        self._pause = False
        self.paused: dict[int, Paused] = {}
        self._over: dict[int, Any] = {}
        self.failure: Failure | None = None
        self.recorder: Recorder | None = None
        self.watch: ExchangeTimes | None = None

    def begin(
        self, size: int | None, make: MakeProgram, failed: Callable[[], None] | None = None, *, pause: bool = False
    ) -> None:
        """Open a step. When ``ready`` returns, the host knows what failed, so ``failed`` is never called."""
        if self._streams and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "thinwire cannot be captured in a CUDA graph, which would repeat one step's seeds and phases for ever: "
                "capture the model's forward and backward inside sync.no_sync(), and exchange outside"
            )
        self._arrived.clear()
        self._ready.clear()
        self._pause, self.paused = pause, {}
        self._next, self._make, self.failure = 0, make, None

    def arrived(self, bucket: int) -> None:
        if self._streams:
            self._arrived.setdefault(bucket, {})[self._current()] = None

    def ready(self, bucket: int, last: bool = False, inline: bool = False) -> bool:
        """Run all programs whose turn has come. Gradients not told by ``arrived`` are the current stream's."""
        events = []
        if self._streams:
            events = [stream.record_event() for stream in {**self._arrived.pop(bucket, {}), self._current(): None}]
        self._ready[bucket] = events
        while self._next in self._ready and self.failure is None:
            self._run(self._next, self._ready[self._next])
            self._next += 1
        return self.failure is None and bucket < self._next

    def resume(self, order: Sequence[int], inline: Sequence[int]) -> None:
        self._over = {}
        # Reads of the shards since then, and of the memory that will be overwritten, are on the current stream.
        since = [self._current().record_event()] if self._streams else []
        for bucket in order:
            if self.failure is not None:
                return
            self._run(bucket, since, self.paused[bucket].program)
            if self._streams:
                self._over[bucket] = self._side(bucket).record_event()

    def wait(self, bucket: int) -> Failure | None:
        if bucket in self._over:
            self._current().wait_event(self._over[bucket])
        return self.failure

    def _current(self) -> Any:
        """The current stream of the tensors' device, which need not be the current device."""
        return torch.cuda.current_stream(self._streams[0].device)

    def _side(self, bucket: int) -> Any:
        return self._streams[bucket % SIDE_STREAMS] if self._streams else None

    def _run(self, bucket: int, events: Sequence[Any], program: Program | None = None) -> None:
        assert self._make is not None
        where, pause, side = "start", self._pause and program is None, self._side(bucket)

        def answer(op: Op) -> Any:
            nonlocal where
            if isinstance(op, NextForward):
                return None
            where = f"{type(op).__name__} on lane {op.group.value}/0"
            kind = type(op).__name__
            ends = issued(kind, op.group, bucket, self.recorder, self.watch, spanned=True)
            before = self._issuer.ledger.total if ends else 0
            with span(kind, bucket):
                value = self._issuer.issue(op, op.group, 0, bucket).wait()
            for end in ends:
                end(self._issuer.ledger.total - before)
            return value

        try:
            with torch.no_grad(), torch.cuda.stream(side) if side is not None else nullcontext():
                for event in events:
                    side.wait_event(event)
                program = self._make(bucket) if program is None else program
                whole: Any = _Segments(program, bucket) if profiling() else program
                found = drive(whole, answer, pause=pause)
                if isinstance(found, Paused):
                    self.paused[bucket] = found
        except Exception as error:
            self.failure = Failure(error, bucket, where)

    def finish(self) -> Failure | None:
        """Make the current stream wait for everything that was issued, as ``wait`` does for the rest of one program."""
        for side in self._streams:
            self._current().wait_stream(side)
        return self.failure

    def close(self) -> None: ...
