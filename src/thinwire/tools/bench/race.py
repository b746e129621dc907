"""A race within minutes: which method reaches DDP's loss first on a link, and how certain that is.

Seconds per step are measured in turns on the link, steps to a loss separately, on ranks without a slow link, but
with the plan that the link has led to where that says how much is sent (LAGS-SGD). Rows that cannot win by their
seconds alone are not trained; the others go through successive halving.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.core.methods.registry import METHODS, method
from thinwire.engine.local.settings import PRESETS, named_local, named_method
from thinwire.predict.measure.kernels import settle
from thinwire.tools.bench.device import names_of_cards
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.race_answer import StepTimes, TimeToLoss, step_times, time_to_loss
from thinwire.tools.bench.race_losses import (
    BASE,
    FEWEST,
    HORIZONS,
    SHARE,
    UPWARD,
    StepsFactor,
    TrainingBudget,
    TrainingSetup,
    Trajectory,
    WholeRun,
    cache_folder,
    digest_of,
    fit,
    halve,
    own_digest,
    recalled,
    remember,
    text_digest,
    trajectories,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.rows import COMPUTE, EVERY, Row, parse_rows
from thinwire.tools.bench.session import (
    BenchError,
    BenchSpec,
    Launch,
    Launched,
    Progress,
    RowRecord,
    RunRecord,
    run_session,
)
from thinwire.tools.bench.words import told

DEFAULT_METHODS = (
    "ssgd,cast:dtype=int8,powersgd:rank=4,local:sync_every=8:codec=int8,"
    "local:sync_every=8:codec=int8:fragment_sync_delay=3,local:sync_every=16:codec=int2"
)
"""Methods that win somewhere in the table in the package, and the exact average; hopeless ones are not trained."""

LONGER_PERIODS = tuple(zip((50.0, 100.0), parse_rows("local:sync_every=32:codec=int2,local:sync_every=64:codec=int2")))
"""More methods, where DDP's exchange takes at least so many times as long as computing: half the period would still
spend a fifth of that on rounds in 2 bits (1/16 of DDP's bytes)."""

WHOLE_METHODS = (
    "alone,accumulate:every=4,ssgd:look=0.5,local:sync_every=4:codec=int2,local:sync_every=4:codec=int2:look=0.3,"
    "local:sync_every=8:codec=int2:look=0.3,local:sync_every=16:codec=int2"
)
"""Of whole runs; one worker alone, and what everybody has: exchanges every few steps of gradients added up."""

LEAST_WHOLE = 100
_RATES = 5  # that a row is trained with, as a rule, until the best is known

SPEND = 0.8  # of the time is planned; the rest is for evaluations and slower phases
_WARMUP = 3  # steps before timed ones: for initial exact steps, and connections


@dataclass(frozen=True)
class RaceSpec:
    """The settings of a race of ``rows`` against DDP; ``link``: in words, with its delay.

    ``link_bits`` None: no limit; ``seeds`` None: as many as fit.
    ``steps``: of whole runs, with a ``schedule`` of the learning rate; None: short runs that fit into ``minutes``.
    ``longer``: (ratio, row) pairs that race only where DDP's step sends for that many times as long as it computes.
    """

    model: str
    rows: tuple[Row, ...]
    workers: int = 2
    ranks_per_node: int = 1
    link: str | None = None
    link_bits: int | None = None
    minutes: float = 10.0
    seeds: int | None = None
    device: str = "cpu"
    longer: tuple[tuple[float, Row], ...] = ()
    steps: int | None = None
    schedule: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes {self.minutes:g} must be above 0, for example 10")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds} must be at least 1")
        if self.steps is not None and self.steps < LEAST_WHOLE:
            raise ValueError(f"--steps {self.steps}: a whole run has at least {LEAST_WHOLE} steps")
        if self.workers < 2:
            raise ValueError(f"--workers {self.workers}: a race needs at least 2, as one has no one to exchange with")
        rows = (Row(BASE, BASE), *(row for row in self.rows if row.label not in (BASE, COMPUTE)))
        object.__setattr__(self, "rows", rows)

    @property
    def key(self) -> str:
        """A digest of everything that determines seconds per step, including this machine."""
        left_out = dict.fromkeys(("minutes", "seeds", "steps", "schedule"))
        told = {**asdict(self), **left_out, "machine": platform.node()}
        cards = names_of_cards() if self.device != "cpu" else []
        return digest_of([told, text_digest(), cards, own_digest(self.model)])


@dataclass(frozen=True)
class RunContext:
    """Where a race is run: launchers on the links and without slow ones; ``folder`` None: the user's cache.

    ``tell`` is called with what is being measured and its number of steps.
    """

    on_link: Launch
    apart: Launch
    tell: Callable[[str, int], None] = lambda text, steps: None
    on_progress: Progress = lambda event: None
    folder: Path | None = None


@dataclass(frozen=True)
class LinkTimes:
    """What was recorded on the link, in that many turns; ``wall_seconds``: total time."""

    record: RunRecord
    turns: int
    wall_seconds: float
    emulated: bool
    note: str
    known_since: str = ""

    @property
    def compute(self) -> RowRecord:
        return next(row for row in self.record.rows if row.kind == COMPUTE)

    @property
    def start_seconds(self) -> float:
        steps = sum(row.untimed_seconds + sum(row.step_seconds) for row in self.record.rows)
        return max(0.0, self.wall_seconds - steps)

    def step_times(self) -> dict[str, StepTimes]:
        return {row.label: step_times(row, self.turns, self.compute) for row in self.record.rows}


@dataclass(frozen=True)
class RaceResult:
    """A race that has been run; ``rows``: the soonest first, those that did not reach the loss last.

    ``target`` is DDP's loss on seed 0, at its best rate, after ``ddp_steps``; ``curves`` are losses on seed 0 at each
    row's best rate, smoothed as they are compared; ``raced`` has the rows that were trained; ``trained`` and ``known``
    count trajectories; ``left_out``: rounds for which there was no time; ``finals``: what
    whole runs ended at. ``needed``: minutes with which rows can be trained, if these did not suffice: then only steps
    were timed, and there is no target.
    """

    asked: RaceSpec
    measured: LinkTimes
    budget: TrainingBudget
    target: float
    ddp_steps: float
    rows: tuple[TimeToLoss, ...]
    raced: dict[str, StepsFactor]
    curves: dict[str, Trajectory]
    trained: int
    known: int
    left_out: int = 0
    finals: dict[str, WholeRun] = field(default_factory=dict)
    needed: int = 0

    def way(self, label: str) -> float | None:
        """Return a row's share of the way from one worker alone to DDP, in final losses; None if that is not known."""
        if not {label, "alone", BASE} <= self.finals.keys():
            return None
        alone, ddp = self.finals["alone"].final, self.finals[BASE].final
        return (alone - self.finals[label].final) / (alone - ddp) if alone > ddp else None


def run_race(asked: RaceSpec, context: RunContext) -> RaceResult:
    began = time.monotonic()
    measured = measure(asked, context)
    timed = {row.label: row.plan for row in measured.record.rows}
    everyone = (*asked.rows, *(row for _, row in asked.longer if row.label in timed))
    asked = replace(asked, rows=tuple(replace(row, plan=timed[row.label]) for row in everyone))
    errors = [row.error for row in measured.record.rows if row.kind not in (BASE, COMPUTE)]
    if errors and all(errors):
        raise BenchError(f"no method trains this model, only DDP does: {errors[0]}")
    times, compute = measured.step_times(), statistics.fmean(measured.compute.step_seconds)
    if asked.steps is not None:
        return _whole_race(asked, context, measured, times, compute)
    raced, budget, notes = _starters(asked, measured, times)
    if isinstance(budget, int):
        rows = [time_to_loss(row.label, times[row.label], compute, None, 0.0) for row in asked.rows]
        untrained = TrainingBudget(0, (1.0,), 0)
        return RaceResult(asked, measured, untrained, math.nan, 0.0, _ordered(asked, measured, rows), {}, {}, 0, 0,
                          needed=budget)  # fmt: skip
    for label, note in notes.items():
        context.tell(f"{label}: {note}", 0)
    runs = _Runs(asked, context, budget)
    ddp_steps, ended = SHARE * budget.steps, list[int]()

    def seconds_to_loss(label: str, factor: StepsFactor) -> float:
        return time_to_loss(label, times[label], compute, factor, ddp_steps).seconds or math.inf

    def goes_on(round_: int, labels: Sequence[str]) -> bool:
        step = sum(times[label].apart_seconds for label in (BASE, *labels))
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
        if is_exact(row) and not times[row.label].error:  # its losses equal DDP's
            factors.setdefault(row.label, StepsFactor(factors[BASE].rate, (1.0,)))
            curves.setdefault(row.label, curves[BASE])
    for label, factor in factors.items():
        if factor.median is None:
            error = runs.found[label, factor.rate, 0].error
            notes[label] = f"failed: {error}" if error else f"not reached in {budget.steps} steps"
    rows = [
        time_to_loss(row.label, times[row.label], compute, factors.get(row.label), ddp_steps, notes.get(row.label, ""))
        for row in asked.rows
    ]
    trained = {label: factors[label] for label in raced}
    return RaceResult(
        asked, measured, budget, target, ddp_steps, _ordered(asked, measured, rows), trained, curves,
        runs.trained, len(runs.found) - runs.trained, budget.rounds - ended[0] if ended else 0,
    )  # fmt: skip


def _whole_race(
    asked: RaceSpec, context: RunContext, measured: LinkTimes, times: Mapping[str, StepTimes], compute: float
) -> RaceResult:
    """Train all rows over whole schedules, at the rate that serves each best."""
    assert asked.steps is not None
    seeds = asked.seeds or 1
    labels = [row.label for row in asked.rows if not times[row.label].error and (row.kind == BASE or not is_exact(row))]
    budget = TrainingBudget(asked.steps, (1.0, UPWARD), seeds)
    each = sum(times[label].apart_seconds for label in labels) * (_RATES + seeds - 1)
    minutes = asked.steps * (each + sum(HORIZONS) * times[BASE].apart_seconds) / 60
    context.tell(f"whole runs of {len(labels)} methods, {asked.steps} steps each: about {minutes:.0f} minutes", 0)
    runs = _Runs(asked, context, budget)
    finals, power = whole_runs(runs.whole, labels, seeds)
    if not (math.isfinite(finals[BASE].final) and power > 0):
        raise BenchError(f"DDP's loss does not fall in {asked.steps} steps: there is nothing to race to")
    factors = whole_factors(finals, power)
    for row in asked.rows:
        if is_exact(row) and not times[row.label].error:
            factors.setdefault(row.label, StepsFactor(factors[BASE].rate, (1.0,)))
    curves = {label: runs.whole(label, one.rate, 0, 1.0) for label, one in finals.items()}
    notes = {label: f"failed: {curves[label].error}" for label in labels if curves[label].error}
    rows = [
        time_to_loss(label, times[label], compute, factors.get(label), asked.steps, notes.get(label, ""))
        for label in (row.label for row in asked.rows)
    ]
    return RaceResult(
        asked, measured, budget, finals[BASE].finals[0], asked.steps, _ordered(asked, measured, rows),
        {label: factors[label] for label in labels if label != BASE}, curves, runs.trained,
        len(runs.found) - runs.trained, finals=finals,
    )  # fmt: skip


@dataclass
class _Runs:
    """The trajectories of a race: each is trained once and then looked up."""

    asked: RaceSpec
    context: RunContext
    budget: TrainingBudget
    found: dict[tuple[str, float, int], Trajectory] = field(default_factory=dict)
    trained: int = 0

    def whole(self, label: str, rate: float, seed: int, share: float) -> Trajectory:
        """Return one row's run with a schedule of that share of the steps."""
        name = f"{label}, {share:g} of the steps" if share < 1 else label
        if (name, rate, seed) not in self.found:
            asked, context = self.asked, self.context
            steps = round(share * self.budget.steps)
            setup = TrainingSetup(
                asked.model, asked.workers, steps, max(1, steps // 8), None, asked.device, asked.schedule
            )
            row = next(row for row in asked.rows if row.label == label)

            def launch(command: list[str], **options: Any) -> Launched:
                context.tell(f"{label}: {steps} steps, seed {seed}, {rate:.3g} x the learning rate", steps)
                return context.apart(command, **options)

            one = trajectories(setup, [row], rate, seed, launch, folder=context.folder, on_progress=self._follow)
            self.found[name, rate, seed] = one[label]
        return self.found[name, rate, seed]

    def __call__(self, labels: Sequence[str], rate: float, seed: int) -> dict[str, Trajectory]:
        asked, budget, context = self.asked, self.budget, self.context
        missing = [label for label in labels if (label, rate, seed) not in self.found]
        if missing:
            rows = [row for row in asked.rows if row.label in missing]
            setup = TrainingSetup(asked.model, asked.workers, budget.steps, budget.every, None, asked.device)
            at = f", {rate:g} x the learning rate" if len(budget.rates) > 1 else ""
            told = f"losses of {', '.join(missing)}: {setup.steps} steps, seed {seed}{at}"

            def launch(command: list[str], **options: Any) -> Launched:  # only if something is not known yet
                context.tell(told, len(missing) * setup.steps)
                return context.apart(command, **options)

            more = trajectories(setup, rows, rate, seed, launch, folder=context.folder, on_progress=self._follow)
            self.found |= {(label, rate, seed): one for label, one in more.items()}
        if (ddp := self.found[BASE, rate, seed]).error and (rate == 1 or seed > 0):
            raise BenchError(f"DDP does not train this model: {ddp.error}")
        return {label: self.found[label, rate, seed] for label in labels}

    def _follow(self, event: dict[str, Any]) -> None:
        self.trained += event.get("state") == "building" and event["row"] != COMPUTE
        self.context.on_progress(event)


def _starters(
    asked: RaceSpec, measured: LinkTimes, times: Mapping[str, StepTimes]
) -> tuple[list[str], TrainingBudget | int, dict[str, str]]:
    """Return which rows are trained besides DDP, how much, and why the others are not.

    If the minutes are over, the second is how many are needed.
    """
    rows, notes = [], {}
    for row in asked.rows[1:]:
        mine = times[row.label]
        if mine.seconds < times[BASE].seconds and not is_exact(row):
            rows.append(row)
        elif not mine.error and not is_exact(row):
            notes[row.label] = "its step is not shorter than DDP's: not trained"
    rows.sort(key=lambda row: times[row.label].seconds * _expected_steps(row, measured.record))
    labels, base = [row.label for row in rows], times[BASE].apart_seconds
    periods = {row.label: period_of(row) for _, row in asked.longer}
    left = SPEND * 60 * asked.minutes - measured.wall_seconds
    while True:
        apart = [times[label].apart_seconds for label in labels]
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
    seconds = measured.wall_seconds + (asked.seeds or 1) * (measured.start_seconds + FEWEST * (base + sum(apart)))
    return [], math.ceil(seconds / SPEND / 60 + 0.5), {}


def _ordered(asked: RaceSpec, measured: LinkTimes, rows: Sequence[TimeToLoss]) -> tuple[TimeToLoss, ...]:
    base = rows[0].seconds
    sent = {row.label: row.wire_bytes for row in measured.record.rows}
    apart = {row.label for row in asked.rows if row.kind in PRESETS}
    compared = [
        replace(
            row,
            sooner=base / row.seconds if base and row.seconds else None,
            apart=row.label in apart,
            bytes_per_step=sent[row.label],
        )
        for row in rows
    ]
    return tuple(sorted(compared, key=lambda row: (row.seconds or math.inf, row.step_seconds or math.inf)))


def _expected_steps(row: Row, record: RunRecord) -> float:
    from thinwire.predict.choose.worth import shipped

    if row.kind not in METHODS and row.kind != "local":
        return 2.0
    known = named_method(row.kind, row.of_method)
    return min(4.0, shipped()(known, record.parameters, record.workers).middle)


def measure(asked: RaceSpec, context: RunContext) -> LinkTimes:
    """Return every row's seconds per step: as already known for this machine, or measured now.

    Raises:
        BenchError: the model or DDP does not train, or not within the time limit.
        ValueError: the user's loss fails.
    """
    place = (context.folder or cache_folder()) / f"measured-{asked.key}.json"
    if (known := recalled(place, LinkTimes)) is not None:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(place.stat().st_mtime))
        return replace(known, known_since=since)
    context.tell("computing time of a step", 1)
    alone, gradient_bytes = _computing(asked)
    nodes = asked.workers // asked.ranks_per_node  # how long the link is busy with an exact average:
    wire = 2 * (nodes - 1) / nodes * gradient_bytes * 8 / asked.link_bits if asked.link_bits else 0.0
    _check_minutes(asked, alone, wire)
    longer = tuple(row for ratio, row in asked.longer if wire >= ratio * alone)
    with_longer = replace(asked, rows=(*asked.rows, *longer))
    if (timed := _timed(with_longer, alone, wire)) is not None:
        asked = with_longer
    steps, turns = timed or _timed(asked, alone, wire) or (2, 1)
    spec = BenchSpec(model=asked.model, rows=asked.rows, workers=asked.workers, ranks_per_node=asked.ranks_per_node,
                     link=asked.link, link_bits=asked.link_bits, steps=steps, rounds=turns, warmup=_WARMUP,
                     operation_seconds=max(300.0, 60 * asked.minutes), device=asked.device)  # fmt: skip
    total = sum(_steps_of(row, steps, turns) for row in (Row(COMPUTE, COMPUTE), *asked.rows))
    context.tell(f"seconds per step on {asked.link or 'a link without a limit'}", total)
    began = time.monotonic()
    record, launched = run_session(spec, context.on_link, context.on_progress)
    found = LinkTimes(record, turns, time.monotonic() - began, launched.emulated, launched.note)
    for label, what in ((COMPUTE, "the model does not train"), (BASE, "DDP does not train this model")):
        if error := next(row.error for row in record.rows if row.label == label):
            raise BenchError(f"{what}: {error}")
    remember(place, found)
    return found


def _computing(asked: RaceSpec) -> tuple[float, int]:
    """Return seconds of forward and backward on a rank, estimated from this process, and the bytes of the gradients."""
    import torch

    device = torch.device(asked.device)
    places = os.cpu_count() or 1 if asked.device == "cpu" else torch.cuda.device_count()
    workload = build_model(asked.model, device=device)
    seconds, threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(2):
            began = time.perf_counter()
            with told(f"the loss of {workload.name!r}"):
                workload.loss(workload.model, step, 0).backward()
                settle(device)
            seconds = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    size = workload.gradient_bytes
    del workload
    torch.cuda.empty_cache()  # the ranks need the card's memory; does nothing without one
    return seconds * max(1.0, asked.workers / places), size


def _timed(asked: RaceSpec, alone: float, wire: float) -> tuple[int, int] | None:
    """Return (steps, turns): two turns within a fifth of the time, or a short one within two fifths, or None."""
    seconds = 60 * asked.minutes
    for steps in range(10, 1, -1):
        if _timing_seconds(asked, steps, 2, alone, wire) <= 0.2 * seconds:
            return steps, 2
    return (2, 1) if _timing_seconds(asked, 2, 1, alone, wire) <= 0.4 * seconds else None


def _timing_seconds(asked: RaceSpec, steps: int, turns: int, alone: float, wire: float) -> float:
    exact = sum(_steps_of(row, steps, turns) for row in asked.rows if is_exact(row))
    return exact * wire + alone * sum(_steps_of(row, steps, turns) for row in (Row(COMPUTE, COMPUTE), *asked.rows))


def _check_minutes(asked: RaceSpec, alone: float, wire: float) -> None:
    """Refuse a time that cannot suffice, even for a short turn and for training DDP and one more row."""
    least, training = _timing_seconds(asked, 2, 1, alone, wire), 2 * FEWEST * alone
    needed = max(least / 0.4, (least + training) / SPEND) / 60
    if asked.minutes < needed:
        step = f"a step of DDP takes at least {max(alone, wire):.3g} s"
        raise BenchError(
            f"timing {len(asked.rows)} methods takes {least / 60:.1f} minutes here and training two of them "
            f"{training / 60:.1f}, as {step}: give --minutes {math.ceil(needed)} or more, or fewer --methods"
        )


def _steps_of(row: Row, steps: int, turns: int) -> int:
    period = period_of(row)
    parts = [_WARMUP, *[1] * (turns - 1), *[steps] * turns]
    return sum(-(-part // period) * period for part in parts)


def period_of(row: Row) -> int:
    """Return after how many steps the row exchanges; 1 if that is in every step, or not known beforehand."""
    if row.kind == "accumulate":
        return int(row.options.get("every", EVERY))
    settings = named_local(row.kind, row.options)
    return settings.sync_every if settings is not None and isinstance(settings.sync_every, int) else 1


def is_exact(row: Row) -> bool:
    """Return whether its steps are worth the same as DDP's, since they are the same up to rounding."""
    if row.kind in METHODS:
        return method(row.kind, **row.of_method).exact and "look" not in row.options
    return row.kind == BASE or (row.kind == "auto" and not row.options.get("lossy", False))
