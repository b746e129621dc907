"""Hugging Face Accelerate: LocalSGD, which averages the parameters every so many steps."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer


def local_sgd(workload: Workload, group: Any, every: int = 8) -> Trainer:
    """``LocalSGD(local_sgd_steps=every)``; Accelerate wraps the model itself, and uses the default process group."""
    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(workload.model, workload.optimizer(workload.model))
    context = LocalSGD(accelerator, module, local_sgd_steps=every, enabled=True)
    context.__enter__()
    return Trainer(module, _Stepping(optimizer, context), lambda: _leave(context), every)


class _Stepping:
    """The optimizer, and LocalSGD's own step after each of its steps."""

    def __init__(self, optimizer: Any, context: Any) -> None:
        self._optimizer, self._context = optimizer, context

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self._optimizer.step()
        self._context.step()


def _leave(context: Any) -> None:
    context.__exit__(None, None, None)
