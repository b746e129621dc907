"""A race: which method reaches DDP's loss first on a link, and how certain that is.

Seconds per step are measured in turns on the link. Losses are measured separately, over whole runs of ranks without a
slow link, but with what the link has led to: how much is sent (LAGS-SGD), or the period of local steps. Rows that
cannot win by their seconds are not trained, except one worker alone, beside which all others are held.
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
from thinwire.tools.bench.race_losses import (
    BASE,
    FEWEST,
    StepsFactor,
    StepTimes,
    TimeToLoss,
    TrainingBudget,
    TrainingSetup,
    Trajectory,
    WholeRun,
    cache_folder,
    digest_of,
    fit,
    own_digest,
    recalled,
    remember,
    step_times,
    text_digest,
    time_to_loss,
    trajectories,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.rows import ALONE, COMPUTE, EVERY, Row, parse_rows
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
    "alone,accumulate:every=4,ssgd,cast:dtype=int4,acp:rank=32,local,local:sync_every=4:codec=int2,"
    "local:sync_every=16:codec=int2"
)
"""What needs no method, the exact average, and what the planner recommends somewhere."""
OWN_PACE = parse_rows("local:pace=own,local:sync_every=4:codec=int2:pace=own,local:sync_every=16:codec=int2:pace=own")
"""More methods for machines of different speed."""

LONGER_PERIODS = tuple(zip((50.0, 100.0), parse_rows("local:sync_every=32:codec=int2,local:sync_every=64:codec=int2")))
"""More methods, where DDP's exchange takes at least so many times as long as computing: half the period would still
spend a fifth of that on rounds in 2 bits (1/16 of DDP's bytes)."""

SPEND = 0.8  # of the time is planned; the rest is for evaluations and slower phases
AUTO = 16  # steps of a period that is chosen on the link, before that
_POINTS = 24  # of a run at which losses are measured
_WARMUP = 3  # steps before timed ones: for initial exact steps, and connections


@dataclass(frozen=True)
class RaceSpec:
    """The settings of a race of ``rows`` against DDP; ``link``: in words, with its delay.

    ``link_bits`` None: no limit; ``seeds`` None: as many as fit.
    ``steps``: of each run; None: as many as fit into ``minutes``. ``schedule``: of the learning rate, over a run.
    ``speeds``: of the workers beside the fastest, 1, which is the first; (): all are as fast.
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
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes {self.minutes:g} must be above 0, for example 10")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds} must be at least 1")
        if self.steps is not None and self.steps < FEWEST:
            raise ValueError(f"--steps {self.steps}: a run has at least {FEWEST} steps")
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

    ``target`` is DDP's last loss on seed 0, at its best rate; ``curves`` are losses on seed 0 at each row's best rate;
    ``raced`` has the rows that were trained; ``trained`` and ``known`` count runs; ``finals``: what runs ended at.
    ``needed``: minutes with which rows can be trained, if these did not suffice: then only steps were timed, and there
    is no target.
    """

    asked: RaceSpec
    measured: LinkTimes
    budget: TrainingBudget
    target: float
    rows: tuple[TimeToLoss, ...]
    raced: dict[str, StepsFactor]
    curves: dict[str, Trajectory]
    trained: int
    known: int
    finals: dict[str, WholeRun] = field(default_factory=dict)
    needed: int = 0

    def way(self, label: str) -> float | None:
        """Return a row's share of the way from one worker alone to DDP, in final losses; None if that is not known."""
        if not {label, ALONE, BASE} <= self.finals.keys():
            return None
        alone, ddp = self.finals[ALONE].final, self.finals[BASE].final
        return (alone - self.finals[label].final) / (alone - ddp) if alone > ddp else None


def run_race(asked: RaceSpec, context: RunContext) -> RaceResult:
    end = math.inf if asked.steps is not None else time.monotonic() + 60 * asked.minutes
    measured = measure(asked, context)
    timed = {row.label: row.plan for row in measured.record.rows}
    everyone = (*asked.rows, *(row for _, row in asked.longer if row.label in timed))
    asked = replace(asked, rows=tuple(replace(row, plan=timed[row.label]) for row in everyone))
    errors = [row.error for row in measured.record.rows if row.kind not in (BASE, COMPUTE)]
    if errors and all(errors):
        raise BenchError(f"no method trains this model, only DDP does: {errors[0]}")
    times, compute = measured.step_times(), statistics.fmean(measured.compute.step_seconds)
    labels, budget, notes = _starters(asked, measured, times)
    if isinstance(budget, int):
        rows = [time_to_loss(row.label, times[row.label], compute, None, 0.0) for row in asked.rows]
        untrained = TrainingBudget(0)
        return RaceResult(asked, measured, untrained, math.nan, _ordered(asked, measured, rows), {}, {}, 0, 0,
                          needed=budget)  # fmt: skip
    for label, note in notes.items():
        context.tell(f"{label}: {note}", 0)
    labels, steps = [BASE, *labels], budget.steps
    apart = [times[label].apart_seconds for label in labels]
    minutes = budget.seconds(apart[0], apart[1:], measured.start_seconds) / 60
    context.tell(f"runs of {len(labels)} methods, {steps} steps each: about {math.ceil(minutes)} minutes", 0)
    known: dict[tuple[str, float], Trajectory] = {}
    trained, runs = 0, 0

    def follow(event: dict[str, Any]) -> None:
        nonlocal trained
        trained += event.get("state") == "building" and event["row"] != COMPUTE
        context.on_progress(event)

    def run(labels: Sequence[str], rate: float, seed: int, share: float) -> Mapping[str, Trajectory]:
        nonlocal runs
        length = round(share * steps)
        setup = TrainingSetup(
            asked.model, asked.workers, length, max(1, length // _POINTS), None, asked.device, asked.schedule,
            asked.speeds,
        )  # fmt: skip

        def launch(command: list[str], **options: Any) -> Launched:  # only if something is not known yet
            at = f", {rate:.3g} x the learning rate" if budget.search else ""
            context.tell(f"losses of {', '.join(labels)}: {length} steps, seed {seed}{at}", len(labels) * length)
            return context.apart(command, **options)

        rows = [row for row in asked.rows if row.label in labels]
        found = trajectories(setup, rows, rate, seed, launch, folder=context.folder, on_progress=follow)
        if share == 1 and seed == 0:
            known.update({(label, rate): one for label, one in found.items()})
        runs += len(found)
        return found

    def more() -> bool:  # models whose rates are far from the best want more of them than were expected
        if time.monotonic() > end:
            context.tell("the minutes are over: no other rates are tried; the same command later goes on from here", 0)
        return time.monotonic() <= end

    finals, power = whole_runs(run, labels, budget.seeds, rates=() if budget.search else (1.0,), more=more)
    curves = {label: known[label, one.rate] for label, one in finals.items()}
    if curves[BASE].error:
        raise BenchError(f"DDP does not train this model: {curves[BASE].error}")
    if not power > 0:
        falls = f"DDP's loss does not fall in {steps} steps: there is nothing to race to"
        raise BenchError(f"{falls}; try another learning rate, or more --minutes")
    factors = whole_factors(finals, power)
    for row in asked.rows:
        if is_exact(row) and not times[row.label].error:  # its losses equal DDP's
            factors.setdefault(row.label, StepsFactor(factors[BASE].rate, (1.0,)))
            curves.setdefault(row.label, curves[BASE])
    notes |= {label: f"failed: {curves[label].error}" for label in labels if curves[label].error}
    rows = [
        time_to_loss(row.label, times[row.label], compute, factors.get(row.label), steps, notes.get(row.label, ""))
        for row in asked.rows
    ]
    return RaceResult(
        asked, measured, budget, finals[BASE].finals[0], _ordered(asked, measured, rows),
        {label: factors[label] for label in labels if label != BASE}, curves, trained, runs - trained, finals,
    )  # fmt: skip


def _starters(
    asked: RaceSpec, measured: LinkTimes, times: Mapping[str, StepTimes]
) -> tuple[list[str], TrainingBudget | int, dict[str, str]]:
    """Return which rows are trained besides DDP, how much, and why the others are not.

    If the minutes are over, the second is how many are needed.
    """
    rows, notes = [], {}
    for row in asked.rows[1:]:
        mine = times[row.label]
        if (row.kind == ALONE and not mine.error) or (mine.seconds < times[BASE].seconds and not is_exact(row)):
            rows.append(row)
        elif not mine.error and not is_exact(row):
            notes[row.label] = "its step is not shorter than DDP's: not trained"
    rows.sort(key=lambda row: (row.kind != ALONE, times[row.label].seconds * _expected_steps(row, measured.record)))
    labels, base, start = [row.label for row in rows], times[BASE].apart_seconds, measured.start_seconds
    if asked.steps is not None:
        return labels, TrainingBudget(asked.steps, asked.seeds or 1), notes
    periods = {row.label: period_of(row) for _, row in asked.longer}
    left = SPEND * 60 * asked.minutes - measured.wall_seconds
    while True:
        apart = [times[label].apart_seconds for label in labels]
        budget = fit(base, apart, left, start=start, seeds=asked.seeds)
        if budget is not None:
            longest = max(labels, key=lambda label: periods.get(label, 0), default=BASE)
            if 5 * periods.get(longest, 0) <= budget.steps:
                return labels, budget, notes
            notes[longest] = f"not trained: runs of {budget.steps} steps have less than five of its periods"
            labels.remove(longest)
            continue
        if len(labels) < 2 + (ALONE in labels):
            break
        notes[labels.pop()] = "not trained: not enough minutes"
    shortest = TrainingBudget(FEWEST, asked.seeds or 1, search=False)
    seconds = measured.wall_seconds + shortest.seconds(base, apart, start)
    return [], math.ceil(seconds / SPEND / 60 + 0.5), {}


def _ordered(asked: RaceSpec, measured: LinkTimes, rows: Sequence[TimeToLoss]) -> tuple[TimeToLoss, ...]:
    base, alone = rows[0].seconds, next((row.seconds for row in rows if row.label == ALONE), None)
    sent = {row.label: row.wire_bytes for row in measured.record.rows}
    apart = {row.label for row in asked.rows if row.kind in PRESETS}
    compared = [
        replace(
            row,
            sooner=base / row.seconds if base and row.seconds else None,
            worth=alone / row.seconds if alone and row.seconds else None,
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
                     operation_seconds=max(300.0, 60 * asked.minutes), device=asked.device,
                     speeds=asked.speeds)  # fmt: skip
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
    least = _timing_seconds(asked, 2, 1, alone, wire)
    training = TrainingBudget(FEWEST, search=False).seconds(alone, (alone,), 0.0)
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
    """Return after how many steps the row exchanges; if a link decides that, as many as it may be."""
    if row.kind == "accumulate":
        return int(row.options.get("every", EVERY))
    settings = named_local(row.kind, row.pinned)
    if settings is None:
        return 1
    return settings.sync_every if isinstance(settings.sync_every, int) else AUTO


def is_exact(row: Row) -> bool:
    """Return whether its steps are worth the same as DDP's, since they are the same up to rounding."""
    if row.kind in METHODS:
        return method(row.kind, **row.of_method).exact and "look" not in row.options
    return row.kind == BASE or (row.kind == "auto" and not row.options.get("lossy", False))
