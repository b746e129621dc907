"""Where an epoch's time goes: waiting for input, or computing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class InputTime:
    """One pass over one loader.

    Attributes:
        batches: that came.
        wait_seconds: until they came.
        step_seconds: of the steps.
    """

    batches: int
    wait_seconds: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.step_seconds


@dataclass(frozen=True)
class StallSplit:
    """The passes over several loaders, by name."""

    passes: dict[str, InputTime]

    def stall_seconds(self, name: str) -> float:
        """How much longer a pass takes than that over ``"synthetic"``; without that one, the time spent waiting.

        Not all waiting is stall: the first batch of a new set of workers is awaited even where nothing is read.

        Raises:
            KeyError: no such loader.
        """
        own = self.passes[name]
        base = self.passes.get(SYNTHETIC)
        return max(0.0, own.wait_seconds if base is None else own.seconds - base.seconds)

    def to_json(self) -> str:
        rows = {
            name: {**asdict(row), "seconds": row.seconds, "stall_seconds": self.stall_seconds(name)}
            for name, row in self.passes.items()
        }
        return json.dumps(rows)


def measure(loaders: Mapping[str, Iterable[Any]], step: Callable[[Any], object]) -> StallSplit:
    """Go through each loader once, in turn, and note the seconds until a batch is there and those of its step.

    Compare ``{"source": ..., "cached": ..., "synthetic": ...}``, the last one with batches that are made in advance:
    the difference to it is what the input costs.

    Args:
        loaders: name -> batches.
        step: what is done with a batch. On CUDA the device is awaited after each, so that its time is the step's.
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
    return StallSplit(passes)
