"""Record when gradients arrive and how long steps take, and agree on these times with the other ranks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from thinwire.core.collectives.exchange import Lane
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.engine.parameters import Managed
from thinwire.engine.ranks.agreement import gather_bytes
from thinwire.predict.measure.kernels import Stopwatch


@dataclass
class _Marks:
    """One step: start of its forward, gradients from first to last, end of its backward."""

    start: Any
    arrivals: dict[int, Any]
    end: Any = None
    paused: float = 0.0  # seconds after the step that were spent on measuring


@dataclass(frozen=True)
class AgreedTimes:
    """The times that the ranks agree on: for each, the slowest rank's.

    Attributes:
        profile: forward up to the first gradient, then from gradient to gradient.
        outside_seconds: from the end of backward to the next forward: optimizer, data.
        step_seconds: from forward to forward.
    """

    profile: ModelProfile
    outside_seconds: float
    step_seconds: float


class Timings:
    """Records the times of the last steps."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)
        self._steps: list[_Marks] = []
        self._open: _Marks | None = None

    def __len__(self) -> int:
        """Return the number of complete steps recorded so far."""
        return max(0, len(self._steps) - 1)

    def clear(self) -> None:
        self._steps, self._open = [], None

    def forward(self) -> None:
        """Record that the model's forward begins."""
        self._open = _Marks(self.stopwatch.mark(), {})

    def arrived(self, index: int) -> None:
        """Record that a gradient is complete."""
        if self._open is not None:
            self._open.arrivals[index] = self.stopwatch.mark()

    def ended(self) -> None:
        """Record that backward and exchange have ended."""
        if self._open is not None and self._open.arrivals:
            self._open.end = self.stopwatch.mark()
            self._steps.append(self._open)
        self._open = None

    def pause(self, seconds: float) -> None:
        """Record that training paused for so long after the step that ended last."""
        if self._steps:
            self._steps[-1].paused += seconds

    def intervals(self) -> list[float]:
        """Return seconds from forward to forward of the complete steps recorded so far, on this rank."""
        self.stopwatch.settle()
        return [self.stopwatch.between(a.start, b.start) - a.paused for a, b in pairwise(self._steps)]

    def agreed(self, managed: Sequence[Managed], lane: Lane, device: torch.device) -> AgreedTimes:
        """Return the medians, for each the slowest rank's. All ranks call it."""
        mine = self._medians(len(managed))
        rows = [json.loads(raw) for raw in gather_bytes(json.dumps(mine).encode(), lane, device)]
        forward, outside, step, *offsets = (max(column) for column in zip(*rows))
        order = sorted((i for i, t in enumerate(offsets) if t >= 0), key=lambda i: (offsets[i], -i))
        tensors, before = [], 0.0
        for i in order:
            tensors.append(TensorTime(managed[i].name, managed[i].shape, offsets[i] - before))
            before = offsets[i]
        tensors += [TensorTime(m.name, m.shape, 0.0) for m in reversed(managed) if offsets[m.index] < 0]
        itemsize = managed[0].parameter.element_size()
        profile = ModelProfile("model", tuple(tensors), forward, (), itemsize, "measured here", f"{len(self)} steps")
        return AgreedTimes(profile, outside, step)

    def _medians(self, count: int) -> list[float]:
        """Return forward, outside, step, and per parameter the time after the first gradient; -1 if it had none."""
        self.stopwatch.settle()
        between, steps = self.stopwatch.between, self._steps
        first = [next(iter(s.arrivals.values())) for s in steps]
        forward = statistics.median(between(s.start, f) for s, f in zip(steps, first))
        outside = statistics.median(between(a.end, b.start) - a.paused for a, b in pairwise(steps))
        step = statistics.median(self.intervals())
        offsets = []
        for i in range(count):
            times = [between(f, s.arrivals[i]) for s, f in zip(steps, first) if i in s.arrivals]
            offsets.append(max(0.0, statistics.median(times)) if times else -1.0)
        return [max(0.0, forward), max(0.0, outside), max(0.0, step), *offsets]
