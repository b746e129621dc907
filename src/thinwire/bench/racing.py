"""A race within minutes: which method is first at DDP's loss on a link, and how sure that is.

Seconds per step are measured in turns on the link, steps to a loss apart, on ranks that nothing slows down. What cannot
win by its seconds alone is not trained; the others are halved.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.bench.finish import Finish, Pace, finish, pace_of
from thinwire.bench.functions import told
from thinwire.bench.halving import BASE, FEWEST, SHARE, Budget, fit, halve
from thinwire.bench.models.registry import build_model, loss_of
from thinwire.bench.race import (
    StepsFactor,
    Track,
    Trajectory,
    cache_folder,
    digest_of,
    own_digest,
    text_digest,
    trajectories,
)
from thinwire.bench.record import RowRecord, RunRecord
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.session import BenchError, Launch, Launched, Progress, run_session
from thinwire.bench.spec import BenchSpec
from thinwire.bench.words import split_options
from thinwire.durable import write_whole
from thinwire.local.settings import PRESETS, local_settings
from thinwire.methods.registry import METHODS, method

DEFAULT_METHODS = (
    "ssgd,cast:dtype=int8,powersgd:rank=4,acp:rank=16,local:sync_every=4:codec=int8,local:sync_every=8:codec=int8"
)
"""What wins somewhere by the shipped table, and the exact average; what cannot win here is not trained."""

_SPEND = 0.8  # of the minutes is planned: evaluations, and a machine that is not always as fast
_WARMUP = 3  # steps before timed ones: those that are exact at first, and connections


@dataclass(frozen=True)
class RaceSpec:
    """What a race was asked.

    Attributes:
        model: as the bench reads it.
        rows: that race against DDP.
        workers, ranks_per_node, link, link_bits, delay: the cluster; ``link_bits`` None: no limit.
        minutes: that it may take.
        seeds: on which rows are compared; None: what fits.
    """

    model: str
    rows: tuple[Row, ...]
    workers: int = 2
    ranks_per_node: int = 1
    link: str | None = None
    link_bits: int | None = None
    delay: str = "0"
    minutes: float = 10.0
    seeds: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes {self.minutes:g} must be above 0, for example 10")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds} must be at least 1")
        if self.workers < 2:
            raise ValueError(f"--workers {self.workers}: a race needs 2 at least, as one has nobody to exchange with")
        object.__setattr__(
            self, "rows", (Row(BASE, BASE), *(row for row in self.rows if row.label not in (BASE, COMPUTE)))
        )

    @property
    def key(self) -> str:
        """A digest of what seconds per step follow from, this machine among it."""
        told = {**asdict(self), "minutes": None, "seeds": None, "text": text_digest(), "machine": platform.node()}
        name = split_options(self.model)[0]
        return digest_of({**told, "model's text": own_digest(name) if ":" in name else ""})


@dataclass(frozen=True)
class Course:
    """Where a race is run, and who is told.

    Attributes:
        on_link, apart: start ranks on the links, and on ranks that nothing slows down.
        tell: (what is learnt now, steps until it is known).
        on_progress: of the ranks.
        folder: where what was learnt is kept; None: the user's cache.
    """

    on_link: Launch
    apart: Launch
    tell: Callable[[str, int], None] = lambda text, steps: None
    on_progress: Progress = lambda event: None
    folder: Path | None = None


@dataclass(frozen=True)
class LinkTimes:
    """What was recorded on the link, in so many turns; ``wall_seconds``: in all."""

    record: RunRecord
    turns: int
    wall_seconds: float
    emulated: bool
    note: str
    known_since: str = ""

    @property
    def compute(self) -> RowRecord:
        """The row that exchanges nothing."""
        return next(row for row in self.record.rows if row.kind == COMPUTE)

    @property
    def start_seconds(self) -> float:
        """Until ranks train."""
        steps = sum(row.untimed_seconds + sum(row.step_seconds) for row in self.record.rows)
        return max(0.0, self.wall_seconds - steps)

    def paces(self) -> dict[str, Pace]:
        """Of every row, by label."""
        return {row.label: pace_of(row, self.turns, self.compute) for row in self.record.rows}


def measure(asked: RaceSpec, course: Course) -> LinkTimes:
    """Every row's seconds per step: as they are known of this machine, or measured now.

    Raises:
        BenchError: the model or DDP does not train, or not within the minutes.
        ValueError: the user's loss fails.
    """
    place = (course.folder or cache_folder()) / f"measured-{asked.key}.json"
    if place.exists():
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(place.stat().st_mtime))
        data = json.loads(place.read_text())
        return LinkTimes(**{**data, "record": RunRecord.from_data(data["record"]), "known_since": since})
    course.tell("what a step computes", 1)
    steps, turns = _timed(asked, *_computing(asked.model, asked.workers))
    spec = BenchSpec(model=asked.model, rows=asked.rows, workers=asked.workers, ranks_per_node=asked.ranks_per_node,
                     link=asked.link, link_bits=asked.link_bits, steps=steps, rounds=turns, warmup=_WARMUP,
                     operation_seconds=max(300.0, 60 * asked.minutes))  # fmt: skip
    total = sum(_steps_of(row, steps, turns) for row in (Row(COMPUTE, COMPUTE), *asked.rows))
    course.tell(f"seconds per step on {asked.link or 'a link without a limit'}", total)
    began = time.monotonic()
    record, launched = run_session(spec, course.on_link, course.on_progress)
    found = LinkTimes(record, turns, time.monotonic() - began, launched.emulated, launched.note)
    for label, what in ((COMPUTE, "the model does not train"), (BASE, "DDP does not train this model")):
        if error := next(row.error for row in record.rows if row.label == label):
            raise BenchError(f"{what}: {error}")
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(asdict(found)), synced=False)
    return found


def _computing(model: str, workers: int) -> tuple[float, int]:
    """Seconds of forward and backward on a rank, by those of this process, and bytes of the gradients."""
    import torch

    workload = build_model(model)
    loss, seconds, threads = loss_of(workload, 0), 0.0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(2):
            began = time.perf_counter()
            with told(f"the loss of {workload.name!r}"):
                loss(workload.model, step).backward()
            seconds = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    return seconds * max(1.0, workers / (os.cpu_count() or 1)), workload.gradient_bytes


def _timed(asked: RaceSpec, alone: float, gradient_bytes: int) -> tuple[int, int]:
    """(steps, turns): two turns within a fifth of the minutes, or a short one, by what exact averages have to send."""
    nodes = asked.workers // asked.ranks_per_node
    wire = 2 * (nodes - 1) / nodes * gradient_bytes * 8 / asked.link_bits if asked.link_bits else 0.0

    def seconds(steps: int, turns: int) -> float:
        exact = sum(_steps_of(row, steps, turns) for row in asked.rows if is_exact(row))
        return exact * wire + alone * sum(_steps_of(row, steps, turns) for row in (Row(COMPUTE, COMPUTE), *asked.rows))

    for steps in range(10, 1, -1):
        if seconds(steps, 2) <= 0.2 * 60 * asked.minutes:
            return steps, 2
    if (least := seconds(2, 1)) > 0.4 * 60 * asked.minutes:
        enough = math.ceil(least / 0.4 / 60)
        step = f"a step of DDP takes {max(alone, wire):.3g} s at least"
        raise BenchError(f"timing {len(asked.rows)} methods takes {least / 60:.1f} minutes here, as {step}: "
                         f"give --minutes {enough} or more, or fewer --methods")  # fmt: skip
    return 2, 1


def _steps_of(row: Row, steps: int, turns: int) -> int:
    """That a row makes in so many turns, in whole periods."""
    settings = local_settings(row.kind, row.options) if row.kind in PRESETS else None
    period = settings.sync_every if settings is not None and isinstance(settings.sync_every, int) else 1
    parts = [_WARMUP, *[1] * (turns - 1), *[steps] * turns]
    return sum(-(-part // period) * period for part in parts)


@dataclass(frozen=True)
class RaceResult:
    """A race that was run.

    Attributes:
        measured: seconds per step.
        budget: of the training.
        target: DDP's loss on seed 0, at its best rate, after ``ddp_steps``.
        rows: the soonest first; what did not get there last.
        raced: steps to the loss, over DDP's, of the rows that were trained.
        curves: losses on seed 0 at each row's best rate, over steps, smoothed as they are compared.
        trained, known: trajectories that were trained now, and that were known before.
        left_out: rounds that the minutes did not suffice for.
    """

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
    """The trajectories of a race: trained once, and found again by all who ask."""

    asked: RaceSpec
    course: Course
    budget: Budget
    found: dict[tuple[str, float, int], Trajectory] = field(default_factory=dict)
    trained: int = 0

    def __call__(self, labels: Sequence[str], rate: float, seed: int) -> dict[str, Trajectory]:
        missing = [label for label in labels if (label, rate, seed) not in self.found]
        if missing:
            rows = [row for row in self.asked.rows if row.label in missing]
            track = Track(self.asked.model, self.asked.workers, self.budget.steps, self.budget.every, None)
            at = f", {rate:g} x the learning rate" if len(self.budget.rates) > 1 else ""
            told = f"losses of {', '.join(missing)}: {track.steps} steps, seed {seed}{at}"

            def launch(command: list[str], **options: Any) -> Launched:  # only where something is not known yet
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
    """Measure, drop what cannot win, and halve what is left.

    Raises:
        BenchError: DDP does not train or does not learn, or the minutes do not suffice.
    """
    began = time.monotonic()
    measured = measure(asked, course)
    paces, notes = measured.paces(), dict[str, str]()
    ddp = paces[BASE]
    raced = []
    for row in asked.rows[1:]:
        if not paces[row.label].error and not is_exact(row):
            if paces[row.label].seconds < ddp.seconds:
                raced.append(row)
            else:
                notes[row.label] = "no step is shorter than DDP's: not trained"
    raced.sort(key=lambda row: paces[row.label].seconds * _prior(row, measured.record))
    left = _SPEND * 60 * asked.minutes - measured.wall_seconds

    def fitting() -> Budget | None:
        apart = [paces[row.label].apart_seconds for row in raced]
        return fit(ddp.apart_seconds, apart, left, start=measured.start_seconds, seeds=asked.seeds)

    while (budget := fitting()) is None and len(raced) > 1:
        notes[raced.pop().label] = "not trained: the minutes do not suffice"
    if budget is None:
        needs = measured.wall_seconds + 2 * measured.start_seconds
        needs += (
            FEWEST * (asked.seeds or 1) * (ddp.apart_seconds + sum(paces[row.label].apart_seconds for row in raced))
        )
        enough = math.ceil(needs / _SPEND / 60 + 0.5)
        raise BenchError(
            f"{asked.minutes:g} minutes do not suffice to train even {FEWEST} steps: give --minutes {enough}"
        )
    for label, note in notes.items():
        course.tell(f"{label}: {note}", 0)
    runs = _Runs(asked, course, budget)
    ddp_steps, ended = SHARE * budget.steps, list[int]()

    def seconds_to_loss(label: str, factor: StepsFactor) -> float:
        pace, middle = paces[label], factor.median
        return math.inf if middle is None else pace.start_seconds + ddp_steps * middle * pace.seconds

    def goes_on(round_: int, labels: Sequence[str]) -> bool:
        step = sum(paces[label].apart_seconds for label in (BASE, *labels))
        suffices = time.monotonic() - began + measured.start_seconds + budget.steps * step <= 60 * asked.minutes
        ended.extend([] if suffices else [round_])
        return suffices

    factors = halve(runs, [row.label for row in raced], seconds_to_loss, budget, goes_on)
    curves = {label: runs.found[label, one.rate, 0].smoothed() for label, one in factors.items()}
    target = curves[BASE].loss_at(ddp_steps)
    if not target < curves[BASE].losses[0]:
        falls = f"DDP's loss does not fall in {budget.steps} steps: there is nothing to race to"
        raise BenchError(f"{falls}; another learning rate, or more --minutes")
    same = StepsFactor(factors[BASE].rate, (1.0,))
    compute = statistics.fmean(measured.compute.step_seconds)
    rows = []
    for row in asked.rows:
        factor = factors.get(row.label) or (same if is_exact(row) else None)
        if (ran := runs.found.get((row.label, factor.rate, 0)) if factor else None) is not None and ran.error:
            notes[row.label] = f"failed: {ran.error}"
        elif factor is not None and factor.median is None:
            notes[row.label] = f"not there in {budget.steps} steps"
        rows.append(finish(row.label, paces[row.label], compute, factor, ddp_steps, notes.get(row.label, "")))
        if is_exact(row) and row.label in paces:
            curves.setdefault(row.label, curves[BASE])
    base = rows[0].seconds
    rows = [replace(row, sooner=base / row.seconds) if base and row.seconds else row for row in rows]
    sent = {row.label: row.wire_bytes for row in measured.record.rows}
    apart = {row.label for row in asked.rows if row.kind in PRESETS}
    rows = [replace(row, apart=row.label in apart, bytes_per_step=sent[row.label]) for row in rows]
    rows.sort(key=lambda row: (row.seconds or math.inf, row.step_seconds or math.inf))
    trained = {label: factor for label, factor in factors.items() if label != BASE}
    left_out = budget.rounds - ended[0] if ended else 0
    return RaceResult(measured, budget, target, ddp_steps, tuple(rows), trained, curves, runs.trained,
                   len(runs.found) - runs.trained, left_out)  # fmt: skip


def is_exact(row: Row) -> bool:
    """Whether its steps are worth DDP's, as they are the same up to rounding."""
    if row.kind in METHODS:
        return method(row.kind, **row.options).exact
    return row.kind == BASE or (row.kind == "auto" and not row.options.get("lossy", False))


def _prior(row: Row, record: RunRecord) -> float:
    """Steps that a row may be expected to need, by the table that comes with the package."""
    from thinwire.planner.choose.worth import shipped

    if row.kind in METHODS:
        known = method(row.kind, **row.options)
    elif row.kind == "local":
        known = local_settings(row.kind, row.options).priced()
    else:
        return 2.0
    return min(4.0, shipped()(known, record.parameters, record.workers).middle)
