"""Which device trains which clients: pure functions of sizes and fits.

``equal``: at random, in equal numbers. ``lpt``: by size, largest first, each to the device that would finish it first.
``pull``: the same order, but each device takes the next client when it is free; this needs no fit, and adapts to a
device that slows down. ``auto``: equal in the warm-up rounds, then pull if there are at least 8 clients per device,
else lpt.

On identical devices lpt is within 4/3 - 1/(3K) of the best makespan (Graham 1969). With few clients per device, pull
can be worse than lpt: a slow device may take a large client at the start, and all wait for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.core.kernels.seeding import seed_of
from thinwire.systems.federated.estimate import Fit

SCHEDULES = ("auto", "equal", "lpt", "pull")
_PULL_FROM = 8  # clients per device


@dataclass(frozen=True)
class Assignment:
    """A cohort, distributed over devices.

    Attributes:
        lists: per device, indices into the cohort, in order; empty if devices pull.
        queue: if devices pull, the order of the clients; otherwise None.
        predicted_seconds: the makespan predicted by the fits; None without fits.
    """

    lists: tuple[tuple[int, ...], ...]
    queue: tuple[int, ...] | None = None
    predicted_seconds: float | None = None

    def to_json(self) -> str:
        return json.dumps([self.lists, self.queue])

    @classmethod
    def from_json(cls, text: str | bytes) -> Assignment:
        """Read what ``to_json`` wrote: who trains whom, without the prediction."""
        lists, queue = json.loads(text)
        return cls(tuple(map(tuple, lists)), None if queue is None else tuple(queue))


def check_schedule(name: str) -> None:
    """Raise ``ValueError`` for an unknown schedule."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; use one of {', '.join(SCHEDULES)}")


def chosen(name: str, *, round: int, warmup_rounds: int, clients: int, devices: int) -> str:
    """Return the schedule of a round: what ``auto`` means then, and equal in the warm-up of lpt, without fits."""
    if devices == 1 or name in ("equal", "pull"):
        return "equal" if devices == 1 else name
    if round < warmup_rounds:
        return "equal"
    if name == "auto":
        return "pull" if clients >= _PULL_FROM * devices else "lpt"
    return name


def by_size(sizes: Sequence[int]) -> list[int]:
    """Return indices, largest first; of equal sizes the lower index first."""
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def equal(sizes: Sequence[int], devices: int, seed: int) -> Assignment:
    """Distribute at random, in equal numbers. With one device: in order."""
    order = list(range(len(sizes)))
    if devices > 1:
        random.Random(seed_of("federated", "equal", seed)).shuffle(order)
    return Assignment(tuple(tuple(sorted(order[device::devices])) for device in range(devices)))


def lpt(sizes: Sequence[int], fits: Sequence[Fit]) -> Assignment:
    """Distribute largest first, each to the device that would finish it first; of equal ones to the lower device.

    Args:
        sizes: samples of each client.
        fits: of each device.
    """
    a, b = np.array([f.a for f in fits]), np.array([f.b for f in fits])
    loads = np.zeros(len(fits))
    lists: list[list[int]] = [[] for _ in fits]
    for i in by_size(sizes):
        ends = loads + a * sizes[i] + b
        device = int(ends.argmin())
        loads[device] = ends[device]
        lists[device].append(i)
    return Assignment(tuple(map(tuple, lists)), predicted_seconds=float(loads.max()) if len(sizes) else 0.0)


def pull(sizes: Sequence[int], fits: Sequence[Fit] | None = None) -> Assignment:
    """Return the queue, and how long it takes by the fits."""
    order = by_size(sizes)
    predicted = None
    if fits is not None:
        free = np.zeros(len(fits))
        for i in order:
            device = int(free.argmin())
            free[device] += fits[device].seconds(sizes[i])
        predicted = float(free.max()) if order else 0.0
    return Assignment((), tuple(order), predicted)


def makespan(lists: Sequence[Sequence[int]], sizes: Sequence[int], fits: Sequence[Fit]) -> float:
    """Return when the last device has finished its list, in seconds."""
    return max((sum(f.seconds(sizes[i]) for i in mine) for mine, f in zip(lists, fits)), default=0.0)


def lower_bound(sizes: Sequence[int], fits: Sequence[Fit]) -> float:
    """Return a lower bound: all devices busy until the end, or the largest client on the device that is best for it."""
    if not sizes:
        return 0.0
    together = sum(sizes) / sum(1 / f.a for f in fits)
    return max(together, max(min(f.seconds(n) for f in fits) for n in sizes))


def plan(name: str, sizes: Sequence[int], fits: Sequence[Fit] | None, devices: int, seed: int) -> Assignment:
    """Distribute a cohort by ``equal``, ``lpt`` or ``pull``.

    Args:
        name: the schedule.
        sizes: samples of each client of the cohort.
        fits: one per device; None: none yet.
        devices: how many there are.
        seed: for the round, used by ``equal``.

    Raises:
        ValueError: there is no device, or the schedule is unknown.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    if name == "equal":
        made = equal(sizes, devices, seed)
        if fits is None:
            return made
        return Assignment(made.lists, None, makespan(made.lists, sizes, fits))
    if name == "lpt":
        return lpt(sizes, fits or [Fit(1.0, 0.0)] * devices)
    if name == "pull":
        return pull(sizes, fits)
    raise ValueError(f"schedule={name!r} is unknown; use one of {', '.join(SCHEDULES)}")
