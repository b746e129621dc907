"""Hooks that note when modules run and when gradients are complete, and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from thinwire.predict.measure.timing import Stopwatch


class Watch:
    """Notes the marks of one training step; a context manager that removes its hooks.

    Attributes:
        started: mark of the first module that ran; None if none did.
        arrivals: parameter -> mark of its gradient, the last one if it arrived in parts.
        calls: (module, True on entry or False on return, mark), in order.
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
        """Note that a forward pass comes next."""
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
    """Restore gradients, buffers and torch's random number state on exit."""
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
