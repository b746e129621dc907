"""How an epoch's time divides into waiting for input and computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class InputTime:
    """One pass over one loader: its batches, the time spent waiting for them, and that of the steps."""

    batches: int
    wait_seconds: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.step_seconds


def measure(loaders: Mapping[str, Iterable[Any]], step: Callable[[Any], object]) -> dict[str, InputTime]:
    """Go through each loader once, one after another, and time the wait for each batch and its step.

    Compare ``{"source": ..., "cached": ..., "synthetic": ...}``, the last with batches made in advance: the difference
    to it is the cost of the input. On CUDA, each step is followed by a device synchronisation, so its time is complete.
    """
    passes = {}
    for name, loader in loaders.items():
        batches, waited, worked = 0, 0.0, 0.0
        before = time.perf_counter()
        for batch in loader:
            came = time.perf_counter()
            step(batch)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            batches, waited = batches + 1, waited + came - before
            before = time.perf_counter()
            worked += before - came
        passes[name] = InputTime(batches, waited + time.perf_counter() - before, worked)
    return passes
