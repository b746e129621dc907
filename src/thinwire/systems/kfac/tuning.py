"""Short runs of K-FAC over dampings and learning rates, and SGD for comparison: what ``thinwire kfac tune`` tries."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.systems.kfac import KFAC
from thinwire.tools.bench.models.registry import build_model, loss_of
from thinwire.tools.pictures import Level, Panel, Picture, Series

_LOOKS = 20  # evaluations of the loss in a run
_AWAY = 3.0  # times the initial loss counts as diverged


@dataclass(frozen=True)
class Trial:
    """One run of SGD with momentum 0.9: steps, seconds (of training alone) and losses at each evaluation."""

    damping: float | None  # of K-FAC; None: plain SGD
    rate: float
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool = False

    @property
    def name(self) -> str:
        return "SGD" if self.damping is None else f"K-FAC damping {self.damping:g}"

    def reached(self, target: float) -> tuple[int, float] | None:
        """Return the steps and seconds until the loss reached the target; None if it never did."""
        rows = zip(self.steps, self.seconds, self.losses)
        return next(((step, seconds) for step, seconds, loss in rows if loss <= target), None)


@dataclass(frozen=True)
class Tuning:
    """The settings to try, on a model of the bench or a user's ``module:function``."""

    model: str
    dampings: Sequence[float]
    rates: Sequence[float]
    steps: int = 200
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> list[tuple[float | None, float]]:
        return [(damping, rate) for damping in (None, *self.dampings) for rate in self.rates]

    def seconds_at_most(self) -> float:
        """Estimate the time of all runs plus one half, from a few first steps of SGD and of K-FAC with an inversion."""
        few = min(self.steps, 10)
        alone = self._run(None, self.rates[0], few, 1, lambda step: None)
        inverting = min(self.steps, max(few, int(self.options.get("inv_update_steps", few))))
        began = time.perf_counter()
        both = self._run(self.dampings[0], self.rates[0], inverting, 1, lambda step: None)
        look = max(0.0, time.perf_counter() - began - both.seconds[-1]) / 2  # two evaluations, and building
        per_rate = alone.seconds[-1] / few + len(self.dampings) * both.seconds[-1] / max(1, both.steps[-1])
        return 1.5 * (len(self.rates) * self.steps * per_rate + len(self.grid) * (_LOOKS + 1) * look)

    def trial(self, damping: float | None, rate: float, on_step: Callable[[int], None]) -> Trial:
        return self._run(damping, rate, self.steps, min(_LOOKS, self.steps), on_step)

    def _run(self, damping: float | None, rate: float, steps: int, looks: int, on_step: Callable[[int], None]) -> Trial:
        workload = build_model(self.model)
        model, loss = workload.model, loss_of(workload, 0)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        kfac = None if damping is None else KFAC(model, None, optimizer=optimizer, damping=damping, **self.options)
        recent: list[float] = []

        def look() -> float:
            if (held_out := workload.held_out_loss()) is not None:
                return held_out
            if recent:
                return sum(recent) / len(recent)
            with torch.no_grad():
                return float(loss(model, 0))

        rows = [(0, 0.0, look())]
        seconds, diverged = 0.0, False
        marks = {round(steps * (i + 1) / looks) for i in range(looks)}
        for step in range(steps):
            began = time.perf_counter()
            found = loss(model, step)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - began
            recent.append(float(found.detach()))
            on_step(step + 1)
            if step + 1 in marks:
                rows.append((step + 1, seconds, look()))
                recent.clear()
                if diverged := not rows[-1][2] <= _AWAY * rows[0][2] + 1e-12:
                    break
        if kfac is not None:
            kfac.close()
        taken, clock, losses = zip(*rows)
        return Trial(damping, rate, taken, clock, losses, diverged)


def best(trials: Sequence[Trial], target: float | None) -> list[Trial]:
    """Sort the trials: soonest to reach the target first, then by last loss; diverged ones last."""
    # steps times the median time of a step, since single runs are noisy
    prices = {
        alone: statistics.median([one.seconds[-1] / one.steps[-1] for one in trials if (one.damping is None) is alone])
        for alone in {one.damping is None for one in trials}
    }

    def place(trial: Trial) -> tuple[bool, float, float]:
        met = None if target is None or trial.diverged else trial.reached(target)
        last = trial.losses[-1]
        seconds = math.inf if met is None else met[0] * prices[trial.damping is None]
        return trial.diverged, seconds, last if math.isfinite(last) else math.inf

    return sorted(trials, key=place)


def lowest_of_sgd(trials: Sequence[Trial]) -> float | None:
    """Return the lowest loss that plain SGD reached; None if it diverged with every rate."""
    return min((min(one.losses[1:]) for one in trials if one.damping is None and not one.diverged), default=None)


def tuning_picture(trials: Sequence[Trial], target: float | None, title: str) -> Picture:
    """Draw loss against steps and seconds: SGD and each damping, at its best rate; diverged runs are left out."""
    chosen: dict[str, Trial] = {}
    for one in best([trial for trial in trials if not trial.diverged], target):
        chosen.setdefault(one.name, one)
    shown = [chosen[name] for name in dict.fromkeys(one.name for one in trials) if name in chosen]
    levels = () if target is None else (Level(target, "target"),)

    def panel(axis: str, places: Callable[[Trial], Sequence[float]]) -> Panel:
        lines = tuple(Series(one.name, tuple(map(float, places(one))), one.losses) for one in shown)
        return Panel(axis, "loss", lines, levels=levels)

    return Picture(title, (panel("steps", lambda one: one.steps), panel("seconds", lambda one: one.seconds)))
