"""What ranks tell each other in a round: their speeds, and who has made steps.

Own pace: on a slower machine a period has fewer steps, so that no machine waits for another.

The fastest rank makes all H steps of a period, rank i makes H_i = max(1, round(H v_i / v)), with v_i steps a second and
v the fastest rank's. After its j-th step of a period, the common step number, by which fragments are sent and merged,
is ``j H // H_i`` steps into it, so that all ranks send and merge the same at the same number. Changes are averaged as
they are: one is as long as the steps that made it.

Uneven ends: a rank without data makes empty steps, and the mean is over those that have made some.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.pricing.periods import own_steps
from thinwire.core.program import AllGather, Program, Topology

logger = logging.getLogger("thinwire")
clock = time.perf_counter
_SHORT = 0.75
"""Of a step in a period: with fewer, others wait for this rank."""
_ROUNDS = 3
"""Rounds whose median is a rank's speed: one long round changes nothing, and a new speed counts from the second."""


class Pace:
    """This rank's steps in each period.

    Args:
        rank: of all that exchange.
        topology: these ranks; those of a machine keep one pace if ``together``, as they average gradients.
        device: of messages.
        own: whether a slower rank makes fewer steps.
        least: of a value of ranks that share a model; its least, or itself.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        device: torch.device,
        *,
        together: bool = False,
        own: bool = True,
        least: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self._rank, self._topology, self._together, self.own = rank, topology, together, own
        self._device, self._least = device, least
        self._left: float | None = None
        self._steps: list[float] = []  # seconds of those since the last message
        self._rounds = deque[float](maxlen=_ROUNDS)  # median seconds of a step, of the last rounds
        self._received: Tensor | None = None
        self._warned = False
        self._stepped = 0  # steps since the last message
        self.initial = False  # averages count ranks that have made no steps, too
        self.training = topology.world_size  # ranks that had made steps when they sent what was merged last
        self._speeds: list[float] = []  # of all ranks, in steps a second; empty: not known yet
        self._period, self.quota, self._made = 1, 1, 0  # of the present period: steps of the fastest, and of this rank
        self.steps = 1  # of the fastest rank in one here

    def begin_period(self, period: int) -> None:
        """Choose how many of its steps this rank makes."""
        share = self._share() if self.own else 1.0
        if share * period < _SHORT and not self._warned:
            self._warned = True
            logger.warning(
                'thinwire: pace="own": a step here takes longer than the %d of the fastest rank in a period, so the '
                "others wait: take sync_every=%d or more", period, math.ceil(1 / share),
            )  # fmt: skip
        self._period, self._made = period, 0
        self.quota = own_steps(period, share)

    def _share(self) -> float:
        if not self._speeds:
            return 1.0
        slowest = dict[int, float]()
        for rank, speed in enumerate(self._speeds):
            unit = self._topology.node_of(rank) if self._together else rank
            slowest[unit] = min(slowest.get(unit, speed), speed)
        mine = self._topology.node_of(self._rank) if self._together else self._rank
        return slowest[mine] / max(slowest.values())

    def stepped(self) -> None:
        """Note that a step was made, before what is due after it."""
        self._stepped += 1
        if self._device.type == "cuda" and self._made + 1 >= self.quota:  # the round waits for what is queued
            torch.cuda.synchronize(self._device)
        if self._left is not None:
            self._steps.append(clock() - self._left)

    def left(self) -> None:
        """Note that the next step begins."""
        self._left = clock()

    @property
    def factor(self) -> float:
        """By what to multiply the mean over all ranks, so that it is over those that have made steps."""
        return 1.0 if self.initial else self._topology.world_size / max(1, self.training)

    def reached(self) -> int:
        """Return how far into the period this step has brought the common number."""
        before = self._made * self._period // self.quota
        self._made = min(self._made + 1, self.quota)
        reached = self._made * self._period // self.quota
        self.steps = reached - before
        return reached

    def send(self) -> Program:
        """Return the program that tells all ranks this one's speed."""
        if self._steps:
            of_steps = statistics.fmean if self._device.type == "cuda" else statistics.median
            self._rounds.append(of_steps(self._steps))
            self._steps.clear()
        seconds = statistics.median(self._rounds) if self._rounds else 0.0
        message = [1 / seconds if seconds > 0 else 0.0, float(self._stepped > 0)]
        self._stepped = 0
        return self._exchange(self._least(torch.tensor(message, dtype=torch.float64, device=self._device)))

    def _exchange(self, message: Tensor) -> Program:
        self._received = yield AllGather(message)

    def merge(self) -> None:
        """Go by what has arrived, from the next period on."""
        if self._received is not None:
            speeds, training = zip(*self._received.tolist())
            self._speeds = list(speeds) if min(speeds) > 0 else self._speeds  # a rank has timed no step yet
            self.training, self._received = round(sum(training)), None

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's state. What is under way must have been received."""
        received = None if self._received is None else self._received.tolist()
        return {
            "rounds": list(self._rounds), "speeds": list(self._speeds), "received": received, "period": self._period,
            "quota": self.quota, "made": self._made, "steps": self.steps, "training": self.training,
        }  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        self._rounds = deque(saved["rounds"], maxlen=_ROUNDS)
        self._speeds, self._period = saved["speeds"], saved["period"]
        self.quota, self._made, self.steps = saved["quota"], saved["made"], saved["steps"]
        received: Sequence[Sequence[float]] | None = saved["received"]
        self._received = None if received is None else torch.tensor(received, dtype=torch.float64)
        self._left, self.training = None, saved["training"]
        self._steps.clear()
