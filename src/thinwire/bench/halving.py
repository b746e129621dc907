"""Successive halving: every round compares rows on one seed more, and only the better half of them goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.bench.race import StepsFactor, Trajectory, tuned

BASE = "ddp"
SHARE = 0.4
"""Of DDP's run, at which its loss is the target: what needs 2.5 times its steps is still seen to arrive."""

FEWEST, ENOUGH, MOST = 48, 120, 480
"""Steps of a run: at least, before more seeds are better, and at most."""

RATES = (0.5, 1.0, 2.0)
"""Factors on the learning rate that are tried where the time suffices."""

_POINTS = 24  # of a run, at which losses are taken


@dataclass(frozen=True)
class Budget:
    """What is trained.

    Attributes:
        steps: of every run.
        rates: factors on the learning rate that are tried on seed 0.
        seeds: on which rows are compared; where several rates are tried, seed 0 is not among them in the end.
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
        """Steps on either side of a point, whose losses its smoothed one is the mean of."""
        return 2 * self.every

    @property
    def rounds(self) -> int:
        """Of the halving; the first one tries the rates."""
        return self.seeds + (len(self.rates) > 1)

    def judged_on(self, round_: int) -> tuple[int, ...]:
        """The seeds that count in a round, from 0: in the first the one that rates are tried on."""
        first = int(len(self.rates) > 1 and round_ > 0)
        return tuple(range(first, round_ + 1))

    def row_runs(self, rows: int) -> list[tuple[int, int]]:
        """(rows, runs of each) of every round, beside those of DDP."""
        made = []
        for round_ in range(self.rounds):
            made.append((rows, 1 if round_ else len(self.rates)))
            rows = kept(rows)
        return made


def kept(rows: int) -> int:
    """How many go on: the better half, and two at least, so that the first has a rival."""
    return min(rows, max(2, math.ceil(rows / 2)))


def fit(
    base: float, others: Sequence[float], seconds: float, *, start: float, seeds: int | None = None
) -> Budget | None:
    """What can be trained in ``seconds``; None: not even a short run of every row.

    Rates are tried where the time suffices for that, then come more seeds, then more steps.

    Args:
        base: seconds of a step of DDP, apart.
        others: of each other row.
        seconds: in all.
        start: seconds until ranks train.
        seeds: as many are wished for; None: up to three.
    """
    dearest = sorted(others, reverse=True)  # as if the dearest went on: what halving leaves is never more
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
    """Steps to DDP's loss of every row, over DDP's own, on as many seeds as the row stayed in the race for.

    Args:
        run: (labels, factor on the rate, seed) -> their trajectories.
        labels: of the rows beside DDP.
        seconds_to_loss: of a row with such a factor; infinite: it does not get there.
        budget: of rates and seeds.
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
