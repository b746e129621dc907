"""A race within minutes: which method reaches DDP's loss first on a link, and how certain that is.

Seconds per step are measured in turns on the link, steps to a loss separately, on ranks without a slow link. Rows that
cannot win by their seconds alone are not trained; the others go through successive halving.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.core.methods.registry import METHODS
from thinwire.engine.local.settings import PRESETS, named_method
from thinwire.tools.bench.finish import Finish, Pace, finish
from thinwire.tools.bench.halving import BASE, FEWEST, SHARE, Budget, fit, halve
from thinwire.tools.bench.race import (
    StepsFactor,
    Track,
    Trajectory,
    trajectories,
)
from thinwire.tools.bench.race_times import SPEND, Course, LinkTimes, RaceSpec, is_exact, measure, period_of
from thinwire.tools.bench.record import RunRecord
from thinwire.tools.bench.rows import COMPUTE, Row, parse_rows
from thinwire.tools.bench.session import BenchError, Launched

DEFAULT_METHODS = (
    "ssgd,cast:dtype=int8,powersgd:rank=4,local:sync_every=8:codec=int8,"
    "local:sync_every=8:codec=int8:fragment_sync_delay=3,local:sync_every=16:codec=int2"
)
"""Methods that win somewhere in the table in the package, and the exact average; hopeless ones are not trained."""

LONGER_PERIODS = tuple(zip((50.0, 100.0), parse_rows("local:sync_every=32:codec=int2,local:sync_every=64:codec=int2")))
"""More methods, where DDP's exchange takes at least so many times as long as computing: half the period would still
spend a fifth of that on rounds in 2 bits (1/16 of DDP's bytes)."""


@dataclass(frozen=True)
class RaceResult:
    """A race that has been run.

    Attributes:
        asked: the settings, with all rows that raced.
        measured: seconds per step.
        budget: budget of the training.
        target: DDP's loss on seed 0, at its best rate, after ``ddp_steps``.
        rows: the soonest first; those that did not reach the loss last.
        raced: steps to the loss, relative to DDP's, of the rows that were trained.
        curves: losses on seed 0 at each row's best rate, over steps, smoothed as they are compared.
        trained, known: numbers of trajectories trained now and known before.
        left_out: number of rounds for which there was no time.
    """

    asked: RaceSpec
    measured: LinkTimes
    budget: Budget
    target: float
    ddp_steps: float
    rows: tuple[Finish, ...]
    raced: dict[str, StepsFactor]
    curves: dict[str, Trajectory]
    trained: int
    known: int
    left_out: int = 0


@dataclass
class _Runs:
    """The trajectories of a race: each is trained once and then looked up."""

    asked: RaceSpec
    course: Course
    budget: Budget
    found: dict[tuple[str, float, int], Trajectory] = field(default_factory=dict)
    trained: int = 0

    def __call__(self, labels: Sequence[str], rate: float, seed: int) -> dict[str, Trajectory]:
        missing = [label for label in labels if (label, rate, seed) not in self.found]
        if missing:
            rows = [row for row in self.asked.rows if row.label in missing]
            track = Track(
                self.asked.model, self.asked.workers, self.budget.steps, self.budget.every, None, self.asked.device
            )
            at = f", {rate:g} x the learning rate" if len(self.budget.rates) > 1 else ""
            told = f"losses of {', '.join(missing)}: {track.steps} steps, seed {seed}{at}"

            def launch(command: list[str], **options: Any) -> Launched:  # only if something is not known yet
                self.course.tell(told, len(missing) * track.steps)
                return self.course.apart(command, **options)

            more = trajectories(track, rows, rate, seed, launch, folder=self.course.folder, on_progress=self._follow)
            self.found |= {(label, rate, seed): one for label, one in more.items()}
        if (ddp := self.found[BASE, rate, seed]).error and (rate == 1 or seed > 0):
            raise BenchError(f"DDP does not train this model: {ddp.error}")
        return {label: self.found[label, rate, seed] for label in labels}

    def _follow(self, event: dict[str, Any]) -> None:
        self.trained += event.get("state") == "building" and event["row"] != COMPUTE
        self.course.on_progress(event)


def run_race(asked: RaceSpec, course: Course) -> RaceResult:
    """Measure, drop rows that cannot win, and halve the rest.

    Raises:
        BenchError: DDP does not train or does not learn, or there is not enough time.
    """
    began = time.monotonic()
    measured = measure(asked, course)
    timed = {row.label for row in measured.record.rows}
    asked = replace(asked, rows=(*asked.rows, *(row for _, row in asked.longer if row.label in timed)))
    errors = [row.error for row in measured.record.rows if row.kind not in (BASE, COMPUTE)]
    if errors and all(errors):
        raise BenchError(f"no method trains this model, only DDP does: {errors[0]}")
    paces, compute = measured.paces(), statistics.fmean(measured.compute.step_seconds)
    raced, budget, notes = _starters(asked, measured, paces)
    for label, note in notes.items():
        course.tell(f"{label}: {note}", 0)
    runs = _Runs(asked, course, budget)
    ddp_steps, ended = SHARE * budget.steps, list[int]()

    def seconds_to_loss(label: str, factor: StepsFactor) -> float:
        return finish(label, paces[label], compute, factor, ddp_steps).seconds or math.inf

    def goes_on(round_: int, labels: Sequence[str]) -> bool:
        step = sum(paces[label].apart_seconds for label in (BASE, *labels))
        suffices = time.monotonic() - began + measured.start_seconds + budget.steps * step <= 60 * asked.minutes
        ended.extend([] if suffices else [round_])
        return suffices

    factors = halve(runs, raced, seconds_to_loss, budget, goes_on)
    curves = {label: runs.found[label, one.rate, 0].smoothed(budget.reach) for label, one in factors.items()}
    target = curves[BASE].loss_at(ddp_steps)
    if not target < curves[BASE].losses[0]:
        falls = f"DDP's loss does not fall in {budget.steps} steps: there is nothing to race to"
        raise BenchError(f"{falls}; try another learning rate, or more --minutes")
    for row in asked.rows:
        if is_exact(row) and not paces[row.label].error:  # its losses equal DDP's
            factors.setdefault(row.label, StepsFactor(factors[BASE].rate, (1.0,)))
            curves.setdefault(row.label, curves[BASE])
    for label, factor in factors.items():
        if factor.median is None:
            error = runs.found[label, factor.rate, 0].error
            notes[label] = f"failed: {error}" if error else f"not reached in {budget.steps} steps"
    rows = [
        finish(row.label, paces[row.label], compute, factors.get(row.label), ddp_steps, notes.get(row.label, ""))
        for row in asked.rows
    ]
    trained = {label: factors[label] for label in raced}
    return RaceResult(
        asked, measured, budget, target, ddp_steps, _ordered(asked, measured, rows), trained, curves,
        runs.trained, len(runs.found) - runs.trained, budget.rounds - ended[0] if ended else 0,
    )  # fmt: skip


def _starters(
    asked: RaceSpec, measured: LinkTimes, paces: Mapping[str, Pace]
) -> tuple[list[str], Budget, dict[str, str]]:
    """Return which rows are trained besides DDP, how much, and why the others are not."""
    rows, notes = [], {}
    for row in asked.rows[1:]:
        pace = paces[row.label]
        if pace.seconds < paces[BASE].seconds and not is_exact(row):
            rows.append(row)
        elif not pace.error and not is_exact(row):
            notes[row.label] = "its step is not shorter than DDP's: not trained"
    rows.sort(key=lambda row: paces[row.label].seconds * _prior(row, measured.record))
    labels, base = [row.label for row in rows], paces[BASE].apart_seconds
    periods = {row.label: period_of(row) for _, row in asked.longer}
    left = SPEND * 60 * asked.minutes - measured.wall_seconds
    while True:
        apart = [paces[label].apart_seconds for label in labels]
        budget = fit(base, apart, left, start=measured.start_seconds, seeds=asked.seeds)
        if budget is not None:
            longest = max(labels, key=lambda label: periods.get(label, 0), default=BASE)
            if 2 * periods.get(longest, 0) <= SHARE * budget.steps:
                return labels, budget, notes
            steps = f"{SHARE * budget.steps:.0f} steps"
            notes[longest] = f"not trained: DDP reaches the loss in {steps}, within two periods"
            labels.remove(longest)
            continue
        if len(labels) < 2:
            break
        notes[labels.pop()] = "not trained: not enough minutes"
    kept = ", ".join(f"{label} {pace.seconds:.3g} s" for label, pace in paces.items() if not pace.error)
    seconds = measured.wall_seconds + (asked.seeds or 1) * (measured.start_seconds + FEWEST * (base + sum(apart)))
    raise BenchError(
        f"--minutes {asked.minutes:g} is not enough to train {FEWEST} steps: "
        f"give {math.ceil(seconds / SPEND / 60 + 0.5)} or more; a step on the link, known to the next race: {kept}"
    )


def _ordered(asked: RaceSpec, measured: LinkTimes, rows: Sequence[Finish]) -> tuple[Finish, ...]:
    """Sort the rows, the soonest first, compared with DDP, which is the first of ``rows``."""
    base = rows[0].seconds
    sent = {row.label: row.wire_bytes for row in measured.record.rows}
    apart = {row.label for row in asked.rows if row.kind in PRESETS}
    made = [
        replace(
            row,
            sooner=base / row.seconds if base and row.seconds else None,
            apart=row.label in apart,
            bytes_per_step=sent[row.label],
        )
        for row in rows
    ]
    return tuple(sorted(made, key=lambda row: (row.seconds or math.inf, row.step_seconds or math.inf)))


def _prior(row: Row, record: RunRecord) -> float:
    """Return the number of steps that a row is expected to need, by the table in the package."""
    from thinwire.predict.choose.worth import shipped

    if row.kind not in METHODS and row.kind != "local":
        return 2.0
    known = named_method(row.kind, row.options)
    return min(4.0, shipped()(known, record.parameters, record.workers).middle)
