"""Simulated clocks: of emulated devices, of the clients' own devices, and of whole rounds, without training."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from thinwire.core.checks import check_count
from thinwire.core.records import UNREADABLE
from thinwire.systems.federated.coordinator import Coordinator, drive
from thinwire.systems.federated.data import sample
from thinwire.systems.federated.schedule import ClientTime, Fit, Planner, lower_bound


@dataclass(frozen=True)
class Speed:
    """How fast a device trains and sends. Nothing sleeps: the numbers drive a simulated clock.

    Attributes:
        seconds_per_sample, seconds_per_client: of training.
        up_bits_per_second, down_bits_per_second: of its link; infinite: sending takes no time.
    """

    seconds_per_sample: float
    seconds_per_client: float = 0.0
    up_bits_per_second: float = math.inf
    down_bits_per_second: float = math.inf

    def __post_init__(self) -> None:
        times = (self.seconds_per_sample, self.seconds_per_client)
        rates = (self.up_bits_per_second, self.down_bits_per_second)
        if not all(math.isfinite(t) and t >= 0 for t in times) or not all(rate > 0 for rate in rates):
            raise ValueError(f"{self} must have seconds of at least 0 and bits per second above 0")

    def train_seconds(self, samples: int) -> float:
        return self.seconds_per_sample * samples + self.seconds_per_client


@dataclass(frozen=True)
class ClientTrace:
    """The devices that clients would run on: client c has device c modulo their number."""

    devices: tuple[Speed, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a trace needs at least one device")

    def round_seconds(self, clients: Iterable[tuple[int, int, int]], down_bytes: int) -> float:
        """Return when the last of ``clients`` (client, samples, bytes that it sends) has answered, if all work at once.

        Each receives ``down_bytes`` first.
        """

        def seconds(client: int, samples: int, up_bytes: int) -> float:
            device = self.devices[client % len(self.devices)]
            moved = 8 * down_bytes / device.down_bits_per_second + 8 * up_bytes / device.up_bits_per_second
            return moved + device.train_seconds(samples)

        return max(starmap(seconds, clients), default=0.0)

    @classmethod
    def read(cls, path: str | Path) -> ClientTrace:
        """Read a JSON list of objects with the fields of :class:`Speed`.

        Raises:
            ValueError: the file holds something else.
        """
        return cls(tuple(read_speeds(path)))


def read_speeds(path: str | Path) -> Sequence[Speed]:
    try:
        rows: Any = json.loads(Path(path).read_text())
        speeds = [Speed(**row) for row in rows]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ValueError(
            f'{path} must hold a JSON list such as [{{"seconds_per_sample": 0.01, "up_bits_per_second": 1e7}}]: {error}'
        ) from error
    if not speeds:
        raise ValueError(f"{path} contains no device")
    return speeds


@dataclass(frozen=True)
class Prediction:
    """The prediction for one schedule.

    Attributes:
        schedule: its name.
        round_seconds: of every round.
        bound_seconds: of every round, a lower bound for any schedule; the same under every schedule.
        busy_share: share of the devices' time in which they are busy, mean over rounds.
    """

    schedule: str
    round_seconds: tuple[float, ...]
    bound_seconds: tuple[float, ...]
    busy_share: float

    @property
    def seconds(self) -> float:
        return statistics.fmean(self.round_seconds)

    @property
    def ratio(self) -> float:
        """``seconds`` divided by the mean of the bound."""
        bound = statistics.fmean(self.bound_seconds)
        return self.seconds / bound if bound else 1.0


def check_cohort(clients_per_round: int, population: int) -> None:
    if not 1 <= clients_per_round <= population:
        raise ValueError(
            f"clients_per_round={clients_per_round} must be between 1 and the number of clients, {population}"
        )


def predict(
    schedule: str,
    population: int,
    samples: Callable[[int], int],
    speeds: Sequence[Speed],
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
) -> Prediction:
    """Simulate the rounds of a run with the clock of the devices' speeds.

    Args:
        schedule, rounds, clients_per_round, seed: as for ``simulate``.
        population, samples: number of clients, and client -> how many samples it has.
        speeds: of the devices.
    """
    check_cohort(clients_per_round, population)
    check_count("rounds", rounds)
    planner = Planner(schedule, len(speeds), seed)
    fits = [Fit(max(s.seconds_per_sample, 1e-12), s.seconds_per_client) for s in speeds]
    seconds, bounds, shares = [], [], []
    for round in range(rounds):
        chosen = sample(seed, round, population, clients_per_round)
        sizes = [samples(client) for client in chosen]
        _, assignment = planner.plan(round, "train", sizes)
        outcome = drive(
            Coordinator(clients_per_round, assignment, range(len(speeds))),
            len(speeds),
            lambda device, i, _, sizes=sizes: speeds[device].train_seconds(sizes[i]),  # type: ignore[misc]
        )
        planner.learn("train", [ClientTime(d, chosen[i], sizes[i], t) for d, i, t in outcome.records])
        seconds.append(outcome.seconds)
        bounds.append(lower_bound(sizes, fits))
        shares.append(sum(outcome.busy_seconds) / (len(speeds) * outcome.seconds) if outcome.seconds else 1.0)
    return Prediction(schedule, tuple(seconds), tuple(bounds), statistics.fmean(shares))
