"""How many steps each row needs for one of DDP's, in whole runs at its best learning rate; and the time to a loss.

The losses of a synchronous method do not depend on the network. So they are measured on ranks without a slow link:
seconds per step times steps to a loss is the time that a user waits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from thinwire.core.durable import user_cache, write_whole
from thinwire.core.records import UNREADABLE, made, plain
from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.session import BenchSpec, Launch, Progress, RowRecord, run_session
from thinwire.tools.bench.words import PACKAGE, load_function, split_options

BASE = "ddp"
FEWEST, ENOUGH, MOST = 100, 240, 2000
"""Steps of a run that minutes decide: minimum, enough to search for learning rates and train more seeds, maximum."""

_Known = TypeVar("_Known")
log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Trajectory:
    """Losses of one row at ``steps``: held out, or without such data training losses since the point before."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    error: str = ""

    @property
    def final(self) -> float:
        """The last loss; infinite if the run failed."""
        return self.losses[-1] if self.losses and math.isfinite(self.losses[-1]) and not self.error else math.inf


@dataclass(frozen=True)
class TrainingSetup:
    """What all compared rows share. ``rate``: what factors multiply; None: the rate of the model's optimizer.

    ``speeds``: of the ranks beside the fastest; (): all are as fast.
    """

    model: str
    workers: int = 2
    steps: int = 240
    every: int = 8
    rate: float | None = 1e-3
    device: str = "cpu"
    schedule: bool = False
    speeds: tuple[float, ...] = ()

    def spec(self, rows: Iterable[Row], factor: float, seed: int) -> BenchSpec:
        named = self.rate is not None
        model = f"{self.model}:lr={self.rate * factor:g}" if self.rate is not None else self.model
        return BenchSpec(model=model, rows=tuple(rows), workers=self.workers, steps=self.steps, warmup=0, seed=seed,
                         curves=True, every=self.every, timeout_seconds=36000.0,
                         rate_factor=1.0 if named else factor, device=self.device, schedule=self.schedule,
                         speeds=self.speeds)  # fmt: skip


def cache_folder() -> Path:
    return user_cache() / "race"


def trajectories(
    setup: TrainingSetup,
    rows: Sequence[Row],
    factor: float,
    seed: int,
    launch: Launch,
    *,
    folder: Path | None = None,
    on_progress: Progress = lambda event: None,
) -> dict[str, Trajectory]:
    """Return the losses of every row, by label: from the cache, or trained on real ranks."""
    folder = folder or cache_folder()
    spec = setup.spec(rows, factor, seed)
    places = {row.label: folder / f"{_key(spec, row)}.json" for row in rows}
    known = {label: recalled(place, Trajectory) for label, place in places.items()}
    found = {label: one for label, one in known.items() if one is not None}
    missing = [row for row in rows if row.label not in found]
    if missing:

        def keep(row: RowRecord) -> None:
            points = [(p.step, p.judged) for p in row.curve if math.isfinite(p.judged)]  # no training loss at the start
            trained = Trajectory(tuple(step for step, _ in points), tuple(loss for _, loss in points), row.error)
            found[row.label] = trained
            if not row.error:
                remember(places[row.label], trained)

        def follow(event: dict[str, Any]) -> None:
            if "trained" in event:  # saved at once, even if later rows fail
                keep(made(RowRecord, event["trained"]))
            on_progress(event)

        record, _ = run_session(replace(spec, rows=tuple(missing)), launch, follow)
        for row in record.rows:
            if row.label in places and row.label not in found:  # not the row without exchange
                keep(row)
    return {row.label: found[row.label] for row in rows}


def _key(spec: BenchSpec, row: Row) -> str:
    told = {"model": spec.model, "workers": spec.workers, "steps": spec.steps, "every": spec.every, "seed": spec.seed,
            "row": [row.kind, row.options, row.plan],
            "device": spec.device, "rate_factor": spec.rate_factor, "schedule": spec.schedule}  # fmt: skip
    if row.own_pace:  # all others take the same steps at any speed
        told["speeds"] = spec.speeds
    return digest_of([told, text_digest(), sys.version, own_digest(spec.model), own_digest(row.kind)])


def digest_of(told: Any) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12).hexdigest()


def own_digest(text: str) -> str:
    """Return a digest of a user's ``module:function``: its file and those of its own that it imports; "" for ours."""
    name = split_options(text)[0]
    if ":" not in name:
        return ""
    load_function(name, "function")
    module = name.partition(":")[0]
    digest = hashlib.blake2b(digest_size=12)
    for file in _own_files(module, Path(str(sys.modules[module].__file__)).resolve()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _own_files(module: str, main: Path) -> tuple[Path, ...]:
    """Return the files that importing a user's module has loaded: in or below its folder, and in no library.

    Cached, as what building the model imports must not change it; what is imported then is not looked at.
    """
    root = main.parents[module.count(".") + (main.name == "__init__.py")]
    libraries = [PACKAGE, *(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))]
    loaded = {Path(file).resolve() for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))}
    return tuple(sorted(f for f in loaded if root in f.parents and not set(libraries) & set(f.parents) and f.is_file()))


@cache
def text_digest() -> str:
    """Return a digest of this package, whose every part may determine losses or times, and of torch's version."""
    import torch

    return package_digest(PACKAGE, torch.__version__)


def package_digest(root: Path, version: str) -> str:
    """Return a digest of all files below ``root``, with their names, and of a version; compiled files do not count."""
    digest = hashlib.blake2b(version.encode(), digest_size=12)
    for file in sorted(root.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def recalled(place: Path, kind: type[_Known]) -> _Known | None:
    try:
        return made(kind, json.loads(place.read_text(encoding="utf-8")))
    except (OSError, *UNREADABLE):
        return None


def remember(place: Path, found: Any) -> None:
    """Keep a dataclass in a file; where that is impossible, say so in the log, since the race itself can go on."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(plain(found)), synced=False, shared=True)
    except OSError as error:
        log.warning("results cannot be kept in %s (%s): the same race would start again", place.parent, error.strerror)


@dataclass(frozen=True)
class StepsFactor:
    """How many steps a row needs for one of DDP's, by seed (None: not reached), at its best factor on the rate."""

    rate: float
    factors: tuple[float | None, ...]

    @property
    def median(self) -> float | None:
        """Median over the seeds; None if half of them or more did not reach the loss."""
        middle = statistics.median(map(_or_never, self.factors))
        return None if middle == math.inf else middle

    @property
    def ends(self) -> tuple[float | None, float | None]:
        ordered = sorted(self.factors, key=_or_never)
        return ordered[0], ordered[-1]


def _or_never(steps: float | None) -> float:
    return math.inf if steps is None else steps


HORIZONS = (0.5, 0.63, 0.8)
"""Shares of a whole run in which DDP is trained too, each with a schedule of its own."""
UPWARD = math.sqrt(2)
_WORSE, _TRIED = 2, 5  # rates in a row that are worse than the best where a search ends; what it tries as a rule


@dataclass(frozen=True)
class WholeRun:
    """Final held-out losses of a row's whole runs by seed, at its best factor on the rate; infinite: it failed."""

    rate: float
    finals: tuple[float, ...]

    @property
    def final(self) -> float:
        return statistics.median(self.finals)


Run = Callable[[Sequence[str], float, int, float], Mapping[str, Trajectory]]
"""(labels, factor on the learning rate, seed, share of the steps) -> their runs, with schedules of their own length."""


def whole_runs(
    run: Run,
    labels: Sequence[str],
    seeds: int,
    *,
    rates: Sequence[float] = (),
    known: tuple[WholeRun, float] | None = None,
    more: Callable[[], bool] = lambda: True,
) -> tuple[dict[str, WholeRun], float]:
    """Train rows over whole schedules, each at its best rate on seed 0. Return them, and the power of DDP's law.

    By that law, through DDP's finals at ``HORIZONS``, DDP's final loss falls as steps to the power of minus that.
    ``rates``: the best of these factors is taken, instead of one that is searched: upwards, and downwards for rows that
    gain nothing by more, until two rates in a row are worse than a row's best. ``known``: DDP and its power, which then
    is not trained. ``more``: whether there is time to try another rate.
    """
    labels = [label for label in labels if known is None or label != BASE]
    finals: dict[str, dict[float, float]] = {label: {} for label in labels}

    def train(rows: Sequence[str], rate: float) -> None:
        for label, one in run(rows, rate, 0, 1.0).items():
            finals[label][rate] = one.final

    def best(label: str) -> float:
        return min(finals[label], key=finals[label].__getitem__)

    for rate in rates or (1.0,):
        train(labels, rate)
    for way in () if rates else (UPWARD, 1 / UPWARD):
        tried, rows = [1.0], [label for label in labels if best(label) == 1.0]
        while rows and more():
            tried.append(tried[-1] * way)
            train(rows, tried[-1])
            rows = [label for label in rows if best(label) in tried[-_WORSE:]]
    chosen = {label: best(label) for label in labels}
    others: dict[str, list[float]] = {label: [] for label in labels}
    for seed in range(1, seeds):
        for rate in dict.fromkeys(chosen.values()):
            for label, one in run([label for label in labels if chosen[label] == rate], rate, seed, 1.0).items():
                others[label].append(one.final)
    found = {label: WholeRun(rate, (finals[label][rate], *others[label])) for label, rate in chosen.items()}
    if known is not None:
        return {BASE: known[0], **found}, known[1]
    ddp = found[BASE]
    marks = [(share, run([BASE], ddp.rate, 0, share)[BASE].final) for share in HORIZONS]
    return found, power_of([*marks, (1.0, ddp.finals[0])]) if math.isfinite(ddp.final) else math.nan


def power_of(marks: Sequence[tuple[float, float]]) -> float:
    """Return the c of loss = b steps^-c with the least squares in logarithms; of runs that failed nothing counts."""
    marks = [mark for mark in marks if math.isfinite(mark[1])]
    if len(marks) < 2:
        return math.nan
    steps, losses = ([math.log(value) for value in column] for column in zip(*marks))
    return -statistics.linear_regression(steps, losses).slope


def whole_factors(found: Mapping[str, WholeRun], power: float) -> dict[str, StepsFactor]:
    """Return how many times DDP's steps each row needs, by seed: DDP's whole run is one."""
    base = found[BASE].finals
    return {
        label: StepsFactor(
            row.rate,
            tuple(
                (mine / its) ** (1 / power) if math.isfinite(mine + its) else None
                for mine, its in zip(row.finals, base)
            ),
        )
        for label, row in found.items()
    }


@dataclass(frozen=True)
class TrainingBudget:
    """Steps of every run, seeds that are compared, and whether each row's learning rate is searched."""

    steps: int
    seeds: int = 1
    search: bool = True

    @property
    def runs(self) -> int:
        """Runs of each row; of DDP also those of ``HORIZONS``. A search takes about five."""
        return (_TRIED if self.search else 1) + self.seeds - 1

    def seconds(self, base: float, others: Sequence[float], start: float) -> float:
        """Return about what it takes; ``base``, ``others``: seconds of a step; ``start``: until ranks train."""
        steps = self.steps * (self.runs * (base + sum(others)) + sum(HORIZONS) * base)
        return steps + (self.runs + len(HORIZONS)) * start


def fit(
    base: float, others: Sequence[float], seconds: float, *, start: float, seeds: int | None = None
) -> TrainingBudget | None:
    """Return the longest runs that can be trained in ``seconds``; None if not even short runs of every row fit.

    Where short runs leave time, learning rates are searched and there are more seeds, unless their number is given.
    """
    wished = [(3, True), (1, True), (1, False)] if seeds is None else [(seeds, True), (seeds, False)]
    for count, search in wished:
        each = TrainingBudget(1, count, search)
        sessions = each.seconds(0.0, (), start)
        steps = min(MOST, int((seconds - sessions) / (each.seconds(base, others, start) - sessions)))
        if steps >= (FEWEST if (count, search) == wished[-1] else ENOUGH):
            return replace(each, steps=steps // 4 * 4)
    return None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on the link: mean over whole periods, then median, minimum and maximum over turns.

    ``start_seconds``: extra time of the first steps; ``apart_seconds``: of a step on ranks without a slow link.
    """

    seconds: float = math.inf
    least: float = math.inf
    most: float = math.inf
    start_seconds: float = 0.0
    apart_seconds: float = 0.0
    error: str = ""


def step_times(row: RowRecord, turns: int, compute: RowRecord) -> StepTimes:
    """Return the times of a row recorded in that many turns; ``compute``: the row without exchange.

    Without a link a step takes its CPU time, stretched like a step without exchange where ranks share cores.
    """
    if row.error or not row.step_seconds:
        return StepTimes(error=row.error or "no step was timed")
    each = len(row.step_seconds) // turns
    means = [statistics.fmean(row.step_seconds[i * each : (i + 1) * each]) for i in range(turns)]
    step = statistics.median(means)
    untimed = len(row.losses) - len(row.step_seconds)
    start = max(0.0, row.untimed_seconds - untimed * step)
    alone = statistics.fmean(compute.step_seconds)
    busy = statistics.fmean(row.host_seconds) * max(1.0, alone / statistics.fmean(compute.host_seconds))
    return StepTimes(step, min(means), max(means), start, min(step, max(alone, busy)))


@dataclass(frozen=True)
class TimeToLoss:
    """The final result of one row; ``seconds`` to the loss include start-up, and None means not reached.

    ``steps`` is the median of its steps factor, ``rate`` the best factor on the learning rate; ends are over seeds (and
    turns), None if some seed did not reach the loss. ``sooner``: how many times sooner than DDP; ``worth``: than one
    worker alone. ``apart``: workers train apart between exchanges, which counts as less simple.
    """

    label: str
    step_seconds: float | None = None
    over_compute: float | None = None
    start_seconds: float | None = None
    rate: float = 1.0
    steps: float | None = None
    fewest_steps: float | None = None
    most_steps: float | None = None
    seeds: int = 0
    seconds: float | None = None
    least_seconds: float | None = None
    most_seconds: float | None = None
    sooner: float | None = None
    worth: float | None = None
    note: str = ""
    apart: bool = False
    bytes_per_step: float | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds to the loss: minimum, median and maximum; infinite if it was not reached."""
        found = (self.least_seconds, self.seconds, self.most_seconds)
        least, median, most = (math.inf if seconds is None else seconds for seconds in found)
        return least, median, most

    @property
    def bytes_sent(self) -> float:
        return self.bytes_per_step or 0.0


def time_to_loss(
    label: str, times: StepTimes, compute: float, factor: StepsFactor | None, ddp_steps: float, note: str = ""
) -> TimeToLoss:
    if times.error:
        return TimeToLoss(label, note=f"failed: {times.error}")
    timed = TimeToLoss(label, times.seconds, times.seconds / compute, times.start_seconds, note=note)
    if factor is None:
        return timed
    middle, (low, high) = factor.median, factor.ends

    def seconds(steps: float | None, step: float) -> float | None:
        return None if steps is None else times.start_seconds + ddp_steps * steps * step

    return replace(
        timed, rate=factor.rate, steps=middle, fewest_steps=low, most_steps=high, seeds=len(factor.factors),
        seconds=seconds(middle, times.seconds), least_seconds=seconds(low, times.least),
        most_seconds=seconds(high, times.most),
    )  # fmt: skip
