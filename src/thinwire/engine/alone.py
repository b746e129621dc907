"""World size 1: every op at once, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.ledger import Ledger
from thinwire.engine.recorder import Recorder
from thinwire.engine.wire import MakeProgram
from thinwire.program.drive import Paused, drive
from thinwire.program.ops import AllGather, NextForward, Op, Program
from thinwire.program.trace import Step


def result_alone(op: Op) -> Tensor | None:
    """What an op returns in a group of one."""
    if isinstance(op, NextForward):
        return None
    return op.tensor.unsqueeze(0) if isinstance(op, AllGather) else op.tensor


def run_alone(program: Program) -> Any:
    """Run a program to its end. Returns its value."""
    return drive(program, result_alone)


class AloneExecutor:
    """Runs programs in the calling thread, as soon as they are ready."""

    def __init__(self) -> None:
        self._make: MakeProgram | None = None
        self._pause = False
        self.paused: dict[int, Paused] = {}
        self.recorder: Recorder | None = None

    def begin(self, make: MakeProgram, pause: bool) -> None:
        """Open a step."""
        self._make, self._pause, self.paused = make, pause, {}

    @torch.no_grad()
    def ready(self, bucket: int, last: bool = False, light: bool = False) -> bool:
        """The bucket's gradients are complete."""
        assert self._make is not None
        found = drive(self._make(bucket), result_alone, pause=self._pause)
        if isinstance(found, Paused):
            self.paused[bucket] = found
        return True

    @torch.no_grad()
    def resume(self, order: Sequence[int], light: Sequence[int]) -> None:
        """Run the rest of these buckets' programs."""
        for bucket in order:
            run_alone(self.paused[bucket].program)


class Alone:
    """Stands for the :class:`~thinwire.engine.communicator.Communicator` of a single rank, where there is no group."""

    rank, backend = 0, "none"

    watch_order = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger = Ledger()
        self.executor = AloneExecutor()

    def agree(self, facts: dict[str, Any]) -> None:
        """There is nobody to differ."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """There is nobody to send to."""

    def gather(self, message: bytes) -> list[bytes]:
        """This rank's message."""
        return [message]

    def spare_cores(self) -> bool:
        """Nothing is sent, so there is no thread that wants one."""
        return True

    def gather_tensor(self, x: Tensor) -> Tensor:
        """This rank's tensor: ``[k]`` -> ``[1, k]``."""
        return x.view(1, -1)

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """The same."""
        return lambda: x.view(1, -1)

    def start(self) -> None:
        """Nothing to start."""

    def open_lanes(self, programs: Iterable[Sequence[Step]]) -> None:
        """No lanes."""

    def begin(self, step: int, names: Sequence[Sequence[str]], make: MakeProgram, *, pause: bool = False) -> None:
        """Open a step."""
        self.executor.begin(make, pause)

    def finish(self) -> str | None:
        """All has been run."""
        return None

    def wait(self, bucket: int) -> str | None:
        """All has been run."""
        return None

    def run(self, program: Program, purpose: str) -> Any:
        """Run a program to its end."""
        return run_alone(program)

    def check_order(self) -> None:
        """There is nobody to differ."""

    def close(self, *, broken: bool) -> None:
        """Nothing to give back."""
