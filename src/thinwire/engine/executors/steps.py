"""Steps of programs on one set of lanes: what gradients and the rounds of a channel have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thinwire.engine.executors.alone import AloneExecutor
from thinwire.engine.executors.issuer import Failure, MakeProgram, OpIssuer
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.engine.executors.threads import ThreadExecutor

Executor = ThreadExecutor | StreamExecutor | AloneExecutor
Names = Sequence[Sequence[str]]
"""For each bucket of a step, the names of what it contains."""


def executor_for(backend: str, issuer: OpIssuer, device: torch.device) -> Executor:
    """Return the executor for tensors of this device under a backend: side streams for NCCL, else a thread."""
    return StreamExecutor(issuer, device) if backend == "nccl" else ThreadExecutor(issuer)


class ProgramSteps:
    """Runs one step after another.

    Args:
        executor: runs the programs.
        in_words: turns a failure into a sentence, given the step's number and the names in its buckets.
    """

    def __init__(self, executor: Executor, in_words: Callable[[Failure, int, Names], str]) -> None:
        self.executor, self._in_words = executor, in_words
        self._number = 0
        self._names: Names = ()

    def begin(self, number: int, names: Names, make: MakeProgram, *, pause: bool = False) -> None:
        """Open a step; ``pause``: its programs stop at their ``NextForward``, see the executors."""
        self._number, self._names = number, names
        self.executor.begin(len(names), make, pause=pause)

    def begin_open(self, number: int, names: Names, make: MakeProgram, failed: Callable[[], None]) -> None:
        """Open a step whose ``names`` grow until a bucket is ready as the last; ``failed``: see the executors."""
        self._number, self._names = number, names
        self.executor.begin(None, make, failed)

    def finish(self) -> str | None:
        """Wait for the step's programs. Return a sentence if one failed."""
        return self._sentence(self.executor.finish())

    def wait(self, bucket: int) -> str | None:
        """Wait for the rest of a paused program that was resumed. Return a sentence if one failed."""
        return self._sentence(self.executor.wait(bucket))

    def _sentence(self, failure: Failure | None) -> str | None:
        return None if failure is None else self._in_words(failure, self._number, self._names)
