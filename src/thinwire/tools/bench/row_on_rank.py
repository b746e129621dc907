"""A contender: one row built in one rank, with its own copy of the model and its own optimizer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from thinwire.core.methods.registry import METHODS
from thinwire.core.program import Plan
from thinwire.engine.local.sync import LocalSync, chosen
from thinwire.engine.stats import Stats
from thinwire.predict.measure.kernels import Stopwatch
from thinwire.tools.bench.device import rank_device
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.rows import ALONE, COMPUTE, EVERY, Row
from thinwire.tools.bench.session import BenchSpec
from thinwire.tools.bench.trainer import OptimizerLike, build_trainer

ONE_BUCKET_MB = 1_000_000
UNUSED = (
    "some parameters got no gradient in the step before, which DDP must know of: return a Workload with "
    "find_unused_parameters=True"
)


@dataclass(frozen=True)
class StepTime:
    """One step of one rank: seconds in total, of forward, and of the main thread's CPU; the loss of its batch."""

    seconds: float
    forward_seconds: float
    host_seconds: float
    loss: float


class RowOnRank:
    """One row, built and stepped. ``initial``: sums of the weights as built, which must be those of all rows.

    ``fastest``: its seconds are the fastest rank's, because it does without the others.
    """

    def __init__(self, row: Row, spec: BenchSpec, group: Any) -> None:
        device = rank_device(spec.device)
        self.row = row
        self.workload: Workload = at_rate(build_model(spec.model, spec.seed, device), spec.rate_factor)
        self.initial = _sums(self.workload.model)
        self._watch = Stopwatch(device)
        self._schedule, self._last = spec.schedule, spec.steps
        self._every = int(row.options.get("every", EVERY)) if row.kind == "accumulate" else 1
        self.optimizer: OptimizerLike
        self.module: nn.Module = self.workload.model
        self.sync: Any = None
        self.steps = 0
        self._numbers: Iterator[int] = count(1)
        self.fastest = bool(spec.speeds) and row.kind in (COMPUTE, ALONE)
        self.close: Callable[[], None] = lambda: None
        self._evaluated: Callable[[], AbstractContextManager[None]] = nullcontext
        self._period = self._every
        if row.is_custom:
            trainer = build_trainer(row, self.workload, group)
            self._period = trainer.period
            self.module, self.optimizer, self.close = trainer.module, trainer.optimizer, trainer.close
            return
        optimizers = listed(self.workload.optimizer(self.workload.model))
        self.optimizer = optimizers[0] if len(optimizers) == 1 else Several(optimizers)
        if row.is_thinwire:
            self._attach(optimizers)
        elif row.kind not in (COMPUTE, ALONE):
            self._wrap(group)

    def step(self, rank: int) -> StepTime:
        host, mark, between = time.thread_time(), self._watch.mark, self._watch.between
        start = mark()
        self._set_rates()
        place = self.steps % self._every
        if place == 0:
            self.optimizer.zero_grad()
        sends = place == self._every - 1
        if self.row.kind == "accumulate":
            self.module.require_backward_grad_sync = sends  # type: ignore[assignment]  # as DDP's no_sync
        try:
            loss = self.workload.loss(self.module, self.steps, rank)
        except RuntimeError as error:
            if self.module is not self.workload.model and "find_unused_parameters=True" in str(error):
                raise RuntimeError(UNUSED) from error
            raise
        forward = mark()
        (loss / self._every if self._every > 1 else loss).backward()
        if sends:
            self.optimizer.step()
        end = mark()
        self.steps = next(self._numbers)
        host = time.thread_time() - host
        value = loss.item()  # on a GPU the marks can be read from here on
        return StepTime(between(start, end), between(start, forward), host, value)

    def _set_rates(self) -> None:
        if self._schedule:
            for group in getattr(self.optimizer, "param_groups", []):
                group["lr"] = group.setdefault("begun", group["lr"]) * share_of_rate(self.steps, self._last)

    @property
    def period(self) -> int:
        """Number of steps after which its traffic repeats."""
        return getattr(self.sync, "period", self._period)

    @property
    def travelling(self) -> bool:
        """Whether something was sent that a later step merges; the same on all ranks."""
        return isinstance(self.sync, LocalSync) and bool(self.sync.pending) and not self.row.own_pace

    @property
    def stats(self) -> Stats | None:
        """thinwire's own counters so far; None for other rows."""
        return None if self.sync is None else self.sync.stats()

    @property
    def counted_plan(self) -> str:
        """As JSON, the plan in force if it says how many elements to send, or what "auto" has found; "" otherwise."""
        if isinstance(self.sync, LocalSync) and (found := chosen(self.sync)):
            return json.dumps(found)
        if self.row.kind not in METHODS:
            return ""
        plan: Plan = self.sync.plan
        return plan.to_json() if any(bucket.kept for phase in plan.phases for bucket in phase) else ""

    def evaluate(self, rank: int) -> float | None:
        if self.workload.evaluate is None:  # then local steps need not put their outer weights in place
            return None
        with self._evaluated():
            return self.workload.held_out_loss(rank)

    def _attach(self, optimizers: list[Optimizer]) -> None:
        import thinwire

        if self.row.kind == "auto":
            lossy = bool(self.row.options.get("lossy", False))
            self.sync = thinwire.attach(self.workload.model, optimizers, "auto", lossy=lossy)
        else:
            plan = {"plan": Plan.from_json(self.row.plan)} if self.row.plan and self.row.kind in METHODS else {}
            self.sync = thinwire.attach(self.workload.model, optimizers, self.row.kind, **self.row.pinned, **plan)
            if isinstance(self.sync, LocalSync):
                self._evaluated = self.sync.outer_weights
            if self.row.own_pace:
                self._numbers = self.sync.steps(1 << 40)  # more than any run has
                self.steps = next(self._numbers)
        self.close = self.sync.close

    def _wrap(self, group: Any) -> None:
        options: dict[str, Any] = {"find_unused_parameters": self.workload.find_unused_parameters}
        if "bucket" in self.row.options:
            options["bucket_cap_mb"] = float(self.row.options["bucket"])
        if self.row.kind == "torch-powersgd":
            options["bucket_cap_mb"] = ONE_BUCKET_MB  # with more than one bucket the hook hangs or aborts on Gloo
        model = DistributedDataParallel(self.workload.model, process_group=group, **options)
        if self.row.kind == "ddp-fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(group, fp16_compress_hook)
        if self.row.kind == "torch-powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            rank = int(self.row.options.get("rank", 4))
            model.register_comm_hook(PowerSGDState(group, rank, start_powerSGD_iter=2), powerSGD_hook)
        self.module = model


class Several:
    """Several optimizers that step together."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self._optimizers:
            one.zero_grad(set_to_none)

    def step(self) -> None:
        for one in self._optimizers:
            one.step()


def listed(made: Optimizer | list[Optimizer]) -> list[Optimizer]:
    return [made] if isinstance(made, Optimizer) else list(made)


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the learning rate of a whole run: up in its first tenth, at most 100 steps, then a cosine.

    The cosine ends at a tenth.
    """
    rise = min(1.0, (step + 1) / min(100, max(1, steps // 10)))
    return rise * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def _sums(model: nn.Module) -> list[str]:
    weights = (p.detach() for p in model.parameters() if not is_lazy(p))
    return [str(x.abs().sum(dtype=torch.float64).item()) for x in weights]


def at_rate(workload: Workload, factor: float) -> Workload:
    """Multiply the learning rates as the optimizer gets them, since a scheduler created beside it keeps the first."""

    def optimizer(model: nn.Module) -> Optimizer | list[Optimizer]:
        add, scaled = Optimizer.add_param_group, list[Optimizer]()

        def add_scaled(made: Optimizer, group: dict[str, Any]) -> None:
            add(made, group)
            last = made.param_groups[-1]
            last["lr"] = last["lr"] * factor  # not in place: groups may share a tensor
            scaled.append(made)

        Optimizer.add_param_group = add_scaled  # type: ignore[method-assign, assignment]
        try:
            made = workload.optimizer(model)
        finally:
            Optimizer.add_param_group = add  # type: ignore[method-assign]
        for existing in (one for one in listed(made) if not any(one is new for new in scaled)):
            for parameters in existing.param_groups:
                parameters["lr"] = parameters["lr"] * factor
        return made

    return workload if factor == 1 else replace(workload, optimizer=optimizer)


def dense_ring_bytes(gradient_bytes: int, workers: int) -> float:
    """Return the bytes that each rank sends in one ring all-reduce of the whole gradient."""
    return 2 * (workers - 1) / workers * gradient_bytes


def new_group(seconds: float) -> Any:
    """Create a group of all ranks, so that a row that fails does not break the next row's (NCCL's watchdog may)."""
    from datetime import timedelta

    return dist.new_group(timeout=timedelta(seconds=seconds))
