"""What every back end does in one visit, and what it reports afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.kernels.seeding import seed_of
from thinwire.systems.federated.clocks import Speed
from thinwire.systems.federated.device import Sums
from thinwire.systems.federated.estimate import ClientTime, Estimates
from thinwire.systems.federated.schedule import Assignment, check_schedule, chosen, plan


@dataclass
class VisitReport:
    """The result of one visit.

    Attributes:
        sums: of the whole cohort.
        device_seconds, predicted_seconds, schedule, busy_seconds, lost_devices: see
            :class:`~thinwire.federated.history.RoundRecord`.
        bytes_up, bytes_down, control_bytes: likewise.
    """

    sums: Sums
    device_seconds: float
    predicted_seconds: float | None
    schedule: str
    busy_seconds: tuple[float, ...]
    bytes_up: int = 0
    bytes_down: int = 0
    control_bytes: int = 0
    lost_devices: tuple[int, ...] = ()


class Planner:
    """Distributes cohorts over devices, and learns from their times.

    Args:
        schedule: "auto", "equal", "lpt" or "pull".
        devices: how many there are.
        seed: of the run.
        warmup_rounds: rounds that are distributed equally, to time every device.
        window_rounds: how many past rounds the fits use.
    """

    def __init__(
        self, schedule: str, devices: int, seed: int, warmup_rounds: int = 2, window_rounds: int | None = 5
    ) -> None:
        check_schedule(schedule)
        if devices < 1:
            raise ValueError(f"devices={devices} must be at least 1")
        if warmup_rounds < 0:
            raise ValueError(f"warmup_rounds={warmup_rounds} must not be negative")
        self.schedule, self.devices, self._seed, self._warmup = schedule, devices, seed, warmup_rounds
        self._estimates = Estimates(window_rounds)
        self._seen: dict[str, int] = {}

    def plan(self, round: int, visit: str, sizes: Sequence[int]) -> tuple[str, Assignment]:
        """Return the schedule in use and the assignment."""
        seen = self._seen.get(visit, 0)
        name = chosen(self.schedule, round=seen, warmup_rounds=self._warmup, clients=len(sizes), devices=self.devices)
        fits = self._estimates.fits(visit, self.devices) if seen else None
        return name, plan(name, sizes, fits, self.devices, seed_of(self._seed, round))

    def learn(self, round: int, visit: str, records: Sequence[ClientTime]) -> None:
        """Record how long clients took."""
        self._seen[visit] = self._seen.get(visit, 0) + 1
        self._estimates.add(round, visit, records)


def seconds_of(speed: Speed | None, measured: float, samples: int) -> float:
    """Return a client's seconds on a device: by the clock of its emulated speed, or as measured."""
    return measured if speed is None else speed.train_seconds(samples)
