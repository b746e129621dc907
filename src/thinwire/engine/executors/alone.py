"""One rank: each op returns at once, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program.ops import AllGather, NextForward, Op, Paused, Program, drive
from thinwire.engine.executors.events import ExchangeTimes, Failure, MakeProgram, Recorder


def result_alone(op: Op) -> Tensor | None:
    if isinstance(op, NextForward):
        return None
    return op.tensor.unsqueeze(0) if isinstance(op, AllGather) else op.tensor


def run_alone(program: Program) -> Any:
    return drive(program, result_alone)


class AloneExecutor:
    failure = None
    watch: ExchangeTimes | None = None  # not used, as nothing takes time; nor is the recorder
    recorder: Recorder | None = None
    paused: dict[int, Paused]
    _make: MakeProgram

    def begin(
        self, size: int | None, make: MakeProgram, failed: Callable[[], None] | None = None, *, pause: bool = False
    ) -> None:
        self._make, self._pause, self.paused = make, pause, {}

    @torch.no_grad()
    def ready(self, bucket: int, last: bool = False, inline: bool = False) -> bool:
        found = drive(self._make(bucket), result_alone, pause=self._pause)
        if isinstance(found, Paused):
            self.paused[bucket] = found
        return True

    @torch.no_grad()
    def resume(self, order: Sequence[int], inline: Sequence[int]) -> None:
        for bucket in order:
            run_alone(self.paused[bucket].program)

    def finish(self) -> Failure | None:
        return None

    def wait(self, bucket: int) -> Failure | None:
        return None

    def close(self) -> None: ...
