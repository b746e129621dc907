"""How long rounds would take on given devices under each schedule: the scheduler and the clock, without training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.systems.federated.backend import Planner
from thinwire.systems.federated.clocks import Speed
from thinwire.systems.federated.cohort import sample
from thinwire.systems.federated.coordinator import Coordinator
from thinwire.systems.federated.estimate import ClientTime, Fit
from thinwire.systems.federated.events import drive
from thinwire.systems.federated.schedule import lower_bound


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
        """Mean seconds of a round."""
        return statistics.fmean(self.round_seconds)

    @property
    def ratio(self) -> float:
        """``seconds`` divided by the mean of the bound."""
        bound = statistics.fmean(self.bound_seconds)
        return self.seconds / bound if bound else 1.0


def predict(
    schedule: str,
    population: int,
    samples: Callable[[int], int],
    speeds: Sequence[Speed],
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
    warmup_rounds: int = 2,
    window_rounds: int | None = 5,
    losses: Mapping[tuple[int, int], float] | None = None,
) -> Prediction:
    """Simulate the rounds of a run with the clock of the devices' speeds.

    Args:
        schedule: "equal", "lpt", "pull" or "auto".
        population: number of clients.
        samples: client -> how many samples it has.
        speeds: of the devices.
        rounds, clients_per_round, seed, warmup_rounds, window_rounds: as for ``simulate``.
        losses: (round, device) -> seconds after which the device is lost in that round.

    Raises:
        ValueError: an option is invalid.
    """
    if not 1 <= clients_per_round <= population:
        raise ValueError(
            f"clients_per_round={clients_per_round} must be between 1 and the number of clients, {population}"
        )
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    planner = Planner(schedule, len(speeds), seed, warmup_rounds, window_rounds)
    fits = [Fit(max(s.seconds_per_sample, 1e-12), s.seconds_per_client) for s in speeds]
    seconds, bounds, shares = [], [], []
    for round in range(rounds):
        chosen = sample(seed, round, population, clients_per_round)
        sizes = [samples(client) for client in chosen]
        _, assignment = planner.plan(round, "train", sizes)
        gone = {device: after for (when, device), after in (losses or {}).items() if when == round}
        outcome = drive(
            Coordinator(clients_per_round, assignment, range(len(speeds))),
            len(speeds),
            lambda device, i, _, sizes=sizes: speeds[device].train_seconds(sizes[i]),  # type: ignore[misc]
            losses=gone,
        )
        planner.learn(round, "train", [ClientTime(d, chosen[i], sizes[i], t) for d, i, t in outcome.records])
        seconds.append(outcome.seconds)
        bounds.append(lower_bound(sizes, fits))
        shares.append(sum(outcome.busy_seconds) / (len(speeds) * outcome.seconds) if outcome.seconds else 1.0)
    return Prediction(schedule, tuple(seconds), tuple(bounds), statistics.fmean(shares))
