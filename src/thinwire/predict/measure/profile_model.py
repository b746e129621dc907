"""Profile a model: when each gradient is complete in backward, and how long each module takes in forward."""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.pricing.profiles import ModelProfile, ModuleTime, TensorTime
from thinwire.core.words import counted
from thinwire.predict.measure.kernels import Clock, Stopwatch

Batches = Callable[[int], Any] | Iterable[Any]
"""number -> batch; or an iterable, which restarts at its end."""

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss of the batch, a scalar."""


def numbered(batches: Batches) -> Callable[[int], Any]:
    """Return a function of the number; for an iterable, it returns the next batch, whatever the number."""
    if callable(batches):
        return batches
    iterator: Iterator[Any] = iter(())

    def take(number: int) -> Any:
        nonlocal iterator
        for _ in range(2):
            for batch in iterator:
                return batch
            iterator = iter(batches)
        raise ValueError("batches is empty: it must give at least one batch")

    return take


class Watch:
    """Notes the marks of one training step; a context manager that removes its hooks.

    ``arrivals``: of each gradient, the last if it came in parts. ``calls``: (module, True on entry or False on return,
    mark), in order.
    """

    def __init__(self, model: nn.Module, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._forward = False
        self.started: Any = None
        self.arrivals: dict[str, Any] = {}
        self.calls: list[tuple[str, bool, Any]] = []
        self._handles: list[Any] = [model.register_forward_pre_hook(lambda *_: self._start())]
        for name, module in model.named_modules():
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._call(name, True)))
                self._handles.append(module.register_forward_hook(lambda *_, name=name: self._call(name, False)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
                self._handles.append(hook)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        self._forward, self.started = True, None
        self.arrivals, self.calls = {}, []

    def turn(self) -> None:
        """Note that the backward pass comes next; forwards repeated there by activation checkpointing do not count."""
        self._forward = False

    def module_seconds(self) -> dict[str, float]:
        """Return the seconds of each module, without those of watched modules inside it, in order of first entry."""
        seconds: dict[str, float] = {}
        open_: list[tuple[str, Any, float]] = []  # module, mark of entry, seconds of modules inside
        for name, entry, mark in self.calls:
            if entry:
                seconds.setdefault(name, 0.0)
                open_.append((name, mark, 0.0))
            elif open_ and open_[-1][0] == name:
                _, start, inside = open_.pop()
                lasted = self._stopwatch.between(start, mark)
                seconds[name] += max(0.0, lasted - inside)
                if open_:
                    outer, begun, before = open_.pop()
                    open_.append((outer, begun, before + lasted))
        return seconds

    def _start(self) -> None:
        if self._forward and self.started is None:
            self.started = self._stopwatch.mark()

    def _call(self, name: str, entry: bool) -> None:
        if self._forward:
            mark = self._stopwatch.mark()
            if self.started is None:
                self.started = mark
            self.calls.append((name, entry, mark))

    def _arrived(self, name: str) -> None:
        self.arrivals.pop(name, None)
        self.arrivals[name] = self._stopwatch.mark()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer


_LEAST_STEPS = 3


def profile_model(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    steps: int = 20,
    warmup: int = 5,
    name: str | None = None,
    batch: str = "",
    seconds: float | None = None,
    clock: Clock = time.perf_counter,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """Time forward and backward of a model; medians over the steps, gradients in order of arrival.

    Gradients, buffers and torch's random number state are restored afterwards; no optimizer runs. Frozen parameters are
    left out; those without a gradient come last, with 0 seconds. Other state that the loss changes stays changed.

    Args:
        model: on the device on which it trains, in training mode.
        batches: step -> batch; or an iterable, which restarts at its end.
        loss: (model, batch) -> a scalar.
        steps: timed steps.
        warmup: steps before them.
        name: name of the profile; None: the model's class.
        batch: description of a batch, for the profile's source.
        seconds: time after which no further step begins, once three are timed; None: no limit.
        on_step: called after each step with the number done and the total.

    Raises:
        ValueError: no trainable parameters, a loss that is not a scalar, sparse gradients, or numbers out of range.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps={steps} must be at least 1 and warmup={warmup} not negative")
    shapes = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on what should be trained")
    device = next(iter(shapes.values())).device
    stopwatch, began, take = Stopwatch(device, clock), time.perf_counter(), numbered(batches)
    forward: list[float] = []
    arrivals: list[dict[str, float]] = []
    in_modules: dict[str, list[float]] = {}
    with untouched(model), Watch(model, stopwatch) as watch:
        for step in range(warmup + steps):
            for parameter in model.parameters():
                parameter.grad = None
            watch.begin()
            started = stopwatch.mark()
            value = loss(model, take(step))
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError(
                    "loss(model, batch) must return a scalar tensor that depends on the model's parameters"
                )
            turned = stopwatch.mark()
            watch.turn()
            value.backward()
            stopwatch.settle()
            for n, parameter in model.named_parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise ValueError(f"{n} gets sparse gradients, which thinwire does not exchange: use sparse=False")
            if step >= warmup:
                forward.append(stopwatch.between(started if watch.started is None else watch.started, turned))
                arrivals.append({n: stopwatch.between(turned, mark) for n, mark in watch.arrivals.items()})
                for n, lasted in watch.module_seconds().items():
                    in_modules.setdefault(n, []).append(lasted)
            on_step(step + 1, warmup + steps)
            late = seconds is not None and time.perf_counter() - began > seconds
            if late and len(forward) >= min(steps, _LEAST_STEPS):
                break
    kinds = {id(p): type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False)}
    return ModelProfile(
        name or type(model).__name__,
        tuple(
            TensorTime(n, tuple(shapes[n].shape), lasted, kinds.get(id(shapes[n]), ""))
            for n, lasted in _apart(arrivals, list(shapes)).items()
        ),
        statistics.median(forward),
        tuple(ModuleTime(n, statistics.median(times)) for n, times in in_modules.items()),
        _element_bytes(list(shapes.values())),
        "measured here",
        ", ".join(filter(None, (_place(device), f"median of {len(forward)} steps", batch))),
    )


def _apart(arrivals: list[dict[str, float]], names: list[str]) -> dict[str, float]:
    """Return the seconds from one gradient to the next: medians of arrivals, so they add up to a whole backward.

    Steps in which some gradients are missing would disturb the order; they count only if there are few others.
    """
    most = max(map(len, arrivals))
    full = [step for step in arrivals if len(step) == most]
    times: dict[str, list[float]] = {}
    for step in full if len(full) >= _LEAST_STEPS else arrivals:
        for name, moment in step.items():
            times.setdefault(name, []).append(moment)
    arrived = {name: statistics.median(moments) for name, moments in times.items()}
    seconds: dict[str, float] = {}
    before = 0.0
    for name in sorted(arrived, key=arrived.__getitem__):
        seconds[name] = max(0.0, arrived[name] - before)
        before = max(before, arrived[name])
    return {**seconds, **{name: 0.0 for name in names if name not in seconds}}


def _element_bytes(parameters: list[nn.Parameter]) -> int:
    sizes: Counter[int] = Counter()
    for parameter in parameters:
        sizes[parameter.element_size()] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = counted(torch.get_num_threads(), "thread")
    return f"{platform.node()}, {date.today()}, torch {torch.__version__}, {where}"
