"""Successive halving: every round compares rows on one more seed, and only the better half goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.tools.bench.race import StepsFactor, Trajectory, tuned

BASE = "ddp"
SHARE = 0.4
"""Point of DDP's run at which its loss is the target: a method that needs 2.5 times the steps still reaches it."""

FEWEST, ENOUGH, MOST = 48, 120, 480
"""Steps of a run: minimum, enough before more seeds are better, and maximum."""

RATES = (0.5, 1.0, 2.0)
"""Factors on the learning rate that are tried if there is time."""

_POINTS = 24  # points of a run at which losses are measured


@dataclass(frozen=True)
class Budget:
    """What will be trained.

    Attributes:
        steps: steps of every run.
        rates: factors on the learning rate that are tried on seed 0.
        seeds: seeds on which rows are compared; if several rates are tried, seed 0 does not count in the end.
    """

    steps: int
    rates: tuple[float, ...]
    seeds: int

    @property
    def every(self) -> int:
        """Steps between two points of a trajectory."""
        return max(1, self.steps // _POINTS)

    @property
    def reach(self) -> int:
        """Steps on either side of a point over which its loss is averaged."""
        return 2 * self.every

    @property
    def rounds(self) -> int:
        """Number of rounds; the first one tries the rates."""
        return self.seeds + (len(self.rates) > 1)

    def judged_on(self, round_: int) -> tuple[int, ...]:
        """Return the seeds that count in a round, numbered from 0: in the first, the one on which rates are tried."""
        first = int(len(self.rates) > 1 and round_ > 0)
        return tuple(range(first, round_ + 1))

    def row_runs(self, rows: int) -> list[tuple[int, int]]:
        """Return (rows, runs of each) for every round, apart from the runs of DDP."""
        made = []
        for round_ in range(self.rounds):
            made.append((rows, 1 if round_ else len(self.rates)))
            rows = kept(rows)
        return made


def kept(rows: int) -> int:
    """Return how many rows go on: the better half, and at least two, so that the first has a rival."""
    return min(rows, max(2, math.ceil(rows / 2)))


def fit(
    base: float, others: Sequence[float], seconds: float, *, start: float, seeds: int | None = None
) -> Budget | None:
    """Return what can be trained in ``seconds``; None if not even a short run of every row fits.

    If there is time, learning rates are tried; then come more seeds, then more steps.

    Args:
        base: step seconds of DDP, on ranks without a slow link.
        others: step seconds of each other row.
        seconds: total time.
        start: seconds until the ranks train.
        seeds: wanted number of seeds; None: up to three.
    """
    dearest = sorted(others, reverse=True)  # assume the most expensive rows go on, as an upper bound
    wished = [(RATES, 3), ((1.0,), 3), ((1.0,), 2), ((1.0,), 1)] if seeds is None else [(RATES, seeds), ((1.0,), seeds)]
    for place, (rates, count) in enumerate(wished):
        budget = Budget(0, rates, count)
        plan = budget.row_runs(len(dearest))
        per_step = sum(runs * (base + sum(dearest[:rows])) for rows, runs in plan)
        sessions = sum(runs if number == 0 else len(rates) for number, (_, runs) in enumerate(plan))
        steps = min(MOST, int((seconds - sessions * start) / per_step))
        if steps >= (FEWEST if place == len(wished) - 1 else ENOUGH):
            return replace(budget, steps=steps // 8 * 8)
    return None


def halve(
    run: Callable[[Sequence[str], float, int], Mapping[str, Trajectory]],
    labels: Sequence[str],
    seconds_to_loss: Callable[[str, StepsFactor], float],
    budget: Budget,
    goes_on: Callable[[int, Sequence[str]], bool] = lambda round_, labels: True,
) -> dict[str, StepsFactor]:
    """Return the steps of every row to DDP's loss, relative to DDP's, on all seeds for which the row was in the race.

    Args:
        run: (labels, factor on the rate, seed) -> their trajectories.
        labels: labels of the rows besides DDP.
        seconds_to_loss: seconds of a row with that factor; infinite if it does not reach the loss.
        budget: rates and seeds.
        goes_on: asked before each round but the first, with its rows; False ends the race.
    """
    alive, found = list(labels), dict[str, StepsFactor]()
    for round_ in range(budget.rounds):
        if round_ and (not alive or not goes_on(round_, alive)):
            break
        judged_on = budget.judged_on(round_)
        measured = tuned(run, [BASE, *alive], BASE, SHARE, reach=budget.reach, rates=budget.rates, seeds=judged_on)
        base = measured[BASE]
        found[BASE] = StepsFactor(base.rate, (1.0,) * len(base.factors))
        for label in alive:
            pairs = zip(measured[label].factors, base.factors)
            over = tuple(None if mine is None or not its else mine / its for mine, its in pairs)
            found[label] = StepsFactor(measured[label].rate, over)
        there = [label for label in alive if math.isfinite(seconds_to_loss(label, found[label]))]
        alive = sorted(there, key=lambda label: seconds_to_loss(label, found[label]))[: kept(len(alive))]
    return found
