"""Which device trains which clients: functions of the clients' sizes and of lines fitted to earlier times.

``equal``: at random, in equal numbers. ``lpt``: by size, largest first, each to the device that would finish it first.
``pull``: the same order, but each device takes the next client when it is free; this needs no fit, and adapts to a
device that slows down. ``auto``: equal in the warm-up rounds, then pull if there are at least 8 clients per device,
else lpt.

On identical devices lpt is within 4/3 - 1/(3K) of the best makespan (Graham 1969). With few clients per device, pull
can be worse than lpt: a slow device may take a large client at the start, and all wait for it.

The lines, per device and kind of visit: seconds = a n + b for a client of n samples (Parrot, arXiv 2303.01778).
Differences from the paper's code: the window counts rounds, not entries per client, so that old timings of rarely drawn
clients are dropped; degenerate data give a line too.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from thinwire.core.checks import check_choice, check_count
from thinwire.core.kernels.seeding import seed_of

SCHEDULES = ("auto", "equal", "lpt", "pull")
_PULL_FROM = 8  # clients per device
_WINDOW = 5  # rounds whose times the fits use
_LEAST_SLOPE = 1e-9


@dataclass(frozen=True)
class Fit:
    """Seconds = ``a`` times samples + ``b``."""

    a: float
    b: float

    def seconds(self, samples: int) -> float:
        return self.a * samples + self.b


class ClientTime(NamedTuple):
    device: int
    client: int
    samples: int
    seconds: float


def fit(samples: Iterable[int], seconds: Iterable[float]) -> Fit:
    """Fit by least squares, with a positive slope and an intercept that is not negative.

    With one size, or else a negative intercept, the line goes through the origin; with no positive slope it is flat.
    """
    n, t = np.asarray(list(samples), dtype=np.float64), np.asarray(list(seconds), dtype=np.float64)
    if n.size == 0:
        raise ValueError("a line needs at least one record")
    proportional = Fit(max(float(t.sum() / n.sum()), _LEAST_SLOPE), 0.0)
    centred = n - n.mean()
    spread = float(centred @ centred)
    if spread == 0.0:
        return proportional
    a = float(centred @ (t - t.mean())) / spread
    b = float(t.mean() - a * n.mean())
    if a < _LEAST_SLOPE:  # time does not grow with size: use a constant time per client
        return Fit(_LEAST_SLOPE, max(float(t.mean()), 0.0))
    return Fit(a, b) if b >= 0 else proportional


@dataclass(frozen=True)
class Assignment:
    lists: tuple[tuple[int, ...], ...]  # per device, indices into the cohort, in order; empty if devices pull
    queue: tuple[int, ...] | None = None  # if devices pull, the order of the clients
    predicted_seconds: float | None = None  # the makespan by the fits; None without fits

    def to_json(self) -> str:
        return json.dumps([self.lists, self.queue])

    @classmethod
    def from_json(cls, text: str | bytes) -> Assignment:
        lists, queue = json.loads(text)
        return cls(tuple(map(tuple, lists)), None if queue is None else tuple(queue))


def check_schedule(name: str) -> str:
    return str(check_choice("schedule", name, SCHEDULES))


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
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))


def equal(sizes: Sequence[int], devices: int, seed: int) -> Assignment:
    order = list(range(len(sizes)))
    if devices > 1:
        random.Random(seed_of("federated", "equal", seed)).shuffle(order)
    return Assignment(tuple(tuple(sorted(order[device::devices])) for device in range(devices)))


def lpt(sizes: Sequence[int], fits: Sequence[Fit]) -> Assignment:
    """Distribute clients of these sizes, each to the device that would finish it first; of equal ones the lower."""
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
    return max((sum(f.seconds(sizes[i]) for i in mine) for mine, f in zip(lists, fits)), default=0.0)


def lower_bound(sizes: Sequence[int], fits: Sequence[Fit]) -> float:
    """Return a lower bound: all devices busy until the end, or the largest client on the device that is best for it."""
    if not sizes:
        return 0.0
    together = sum(sizes) / sum(1 / f.a for f in fits)
    return max(together, max(min(f.seconds(n) for f in fits) for n in sizes))


def plan(name: str, sizes: Sequence[int], fits: Sequence[Fit] | None, devices: int, seed: int) -> Assignment:
    """Distribute a cohort of clients of these sizes by ``equal``, ``lpt`` or ``pull``; there may be no fits yet."""
    check_count("devices", devices)
    if name == "lpt":
        return lpt(sizes, fits or [Fit(1.0, 0.0)] * devices)
    if name == "pull":
        return pull(sizes, fits)
    check_schedule(name)
    made = equal(sizes, devices, seed)
    return made if fits is None else Assignment(made.lists, None, makespan(made.lists, sizes, fits))


class Planner:
    """Distributes cohorts over devices, and learns from their last times; equally at first, to time every device."""

    def __init__(self, schedule: str, devices: int, seed: int, warmup_rounds: int = 2) -> None:
        self.schedule, self.devices = check_schedule(schedule), check_count("devices", devices)
        self._warmup, self._seed = check_count("warmup_rounds", warmup_rounds, 0), seed
        self._seen = Counter[str]()  # rounds, by visit
        self._times: dict[str, deque[Sequence[ClientTime]]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def plan(self, round: int, visit: str, sizes: Sequence[int]) -> tuple[str, Assignment]:
        seen = self._seen[visit]
        name = chosen(self.schedule, round=seen, warmup_rounds=self._warmup, clients=len(sizes), devices=self.devices)
        fits = self.fits(visit) if seen else None
        return name, plan(name, sizes, fits, self.devices, seed_of(self._seed, round))

    def learn(self, visit: str, records: Sequence[ClientTime]) -> None:
        self._seen[visit] += 1
        self._times[visit].append(records)

    def fits(self, visit: str) -> list[Fit]:
        """Return a line per device; without records the others' mean; if nobody has any, 1 s per sample."""
        by_device: dict[int, list[ClientTime]] = {}
        for record in chain.from_iterable(self._times[visit]):
            by_device.setdefault(record.device, []).append(record)
        known = {
            device: fit((r.samples for r in records), (r.seconds for r in records))
            for device, records in by_device.items()
        }
        if not known:
            return [Fit(1.0, 0.0)] * self.devices
        mean = Fit(*(float(np.mean([getattr(f, name) for f in known.values()])) for name in ("a", "b")))
        return [known.get(device, mean) for device in range(self.devices)]
