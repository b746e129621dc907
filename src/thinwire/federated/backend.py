"""What every back end does for one visit, and what it says about it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.federated.clocks import Speed
from thinwire.federated.device import Sums
from thinwire.federated.estimate import Estimates, Record
from thinwire.federated.schedule import Assignment, check_schedule, chosen, plan
from thinwire.kernels.seeding import seed_of


@dataclass
class VisitReport:
    """One visit.

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
    """Deals cohorts out and learns from the times.

    Args:
        schedule: "auto", "equal", "lpt" or "pull".
        devices: how many there are.
        seed: of the run.
        warmup_rounds: assigned equally, so that every device has been seen.
        window_rounds: how far back the fits look.
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
        """The schedule in force and the assignment."""
        seen = self._seen.get(visit, 0)
        name = chosen(self.schedule, round=seen, warmup_rounds=self._warmup, clients=len(sizes), devices=self.devices)
        fits = self._estimates.fits(visit, self.devices) if seen else None
        return name, plan(name, sizes, fits, self.devices, seed_of(self._seed, round))

    def learn(self, round: int, visit: str, records: Sequence[Record]) -> None:
        """Note what clients took."""
        self._seen[visit] = self._seen.get(visit, 0) + 1
        self._estimates.add(round, visit, records)


def seconds_of(speed: Speed | None, measured: float, samples: int) -> float:
    """What a client counts as on a device: the clock of its speed, or the wall's."""
    return measured if speed is None else speed.train_seconds(samples)
