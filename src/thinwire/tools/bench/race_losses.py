"""How many steps each row needs to DDP's loss: losses are trained once and kept, rates tuned alike, rows halved.

The losses of a synchronous method do not depend on the network. So they are measured on ranks without a slow link:
seconds per step times steps to a loss is the time that a user waits.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import logging
import math
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from thinwire.core.durable import user_cache, write_whole
from thinwire.core.records import UNREADABLE, made, plain
from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.session import BenchSpec, Launch, Progress, RowRecord, reached, run_session
from thinwire.tools.bench.words import PACKAGE, load_function, split_options

BASE = "ddp"
SHARE = 0.4
"""Point of DDP's run at which its loss is the target: a method that needs 2.5 times the steps still reaches it."""

FEWEST, ENOUGH, MOST = 48, 120, 480
"""Steps of a run: minimum, enough before more seeds are better, and maximum."""

RATES = (0.5, 1.0, 2.0)
"""Factors on the learning rate that are tried if there is time."""

_AROUND = (0.75, 0.875, 1.0, 1.125, 1.25)  # of the share: a single target is subject to luck
_POINTS = 24  # points of a run at which losses are measured

_Known = TypeVar("_Known")
log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Trajectory:
    """Losses of one row at ``steps``: held out, or without such data training losses since the point before."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    error: str = ""

    def steps_to(self, target: float) -> float | None:
        return reached(zip(map(float, self.steps), self.losses), target)

    def smoothed(self, reach: float) -> Trajectory:
        """Return the mean over the points within ``reach`` steps on either side, since a single evaluation is noisy.

        Both sides cover the same distance. The curve falls ever more slowly, so a wider mean is higher: rows are
        compared with the same reach, even if one has fewer points. The loss before the first step, the highest by far,
        counts in no other mean.
        """
        means = []
        for place, here in enumerate(self.steps):
            before = sum(step > 0 and here - step <= reach for step in self.steps[:place])
            after = sum(step - here <= reach for step in self.steps[place + 1 :])
            beside = min(before, after)
            means.append(statistics.fmean(self.losses[place - beside : place + beside + 1]))
        return replace(self, losses=tuple(means))

    def loss_at(self, step: float) -> float:
        for (first, before), (last, after) in pairwise(zip(self.steps, self.losses)):
            if first <= step <= last:
                return before + (after - before) * (step - first) / (last - first)
        raise ValueError(f"the run ended before step {step:g}")


@dataclass(frozen=True)
class TrainingSetup:
    """What all compared rows share. ``rate``: what factors multiply; None: the rate of the model's optimizer."""

    model: str
    workers: int = 2
    steps: int = 240
    every: int = 8
    rate: float | None = 1e-3
    device: str = "cpu"
    schedule: bool = False

    def spec(self, rows: Iterable[Row], factor: float, seed: int) -> BenchSpec:
        named = self.rate is not None
        model = f"{self.model}:lr={self.rate * factor:g}" if self.rate is not None else self.model
        return BenchSpec(model=model, rows=tuple(rows), workers=self.workers, steps=self.steps, warmup=0, seed=seed,
                         curves=True, every=self.every, timeout_seconds=36000.0,
                         rate_factor=1.0 if named else factor, device=self.device, schedule=self.schedule)  # fmt: skip


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
    """Return the files of a user's module: its own, and those it has imported or imports later, in a function.

    They lie in or below the module's folder and in no library. Cached, as building the model must not change it.
    """
    root = main.parents[module.count(".") + (main.name == "__init__.py")]
    libraries = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]

    def is_own(file: Path) -> bool:
        folders = file.parents
        return root in folders and not any(place in folders for place in (PACKAGE, *libraries)) and file.is_file()

    loaded = {Path(file).resolve() for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))}
    found, left = {main}, [main, *filter(is_own, loaded)]
    while left:
        file = left.pop()
        found.add(file)
        left += [one for one in _imported(file, root) if one not in found and is_own(one)]
    return tuple(sorted(found))


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a file's import statements may mean, below ``root`` or the file's folder."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # not Python, such as an extension module
        return
    for node in ast.walk(tree):
        names, places = [], [root, file.parent]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            names = [start, *(f"{start}.{alias.name}".lstrip(".") for alias in node.names)]
            places = [file.parents[node.level - 1]] if node.level else places
        for parts in (name.split(".") for name in names if name):
            inner = [place.joinpath(*parts[:end]) for place in places for end in range(1, len(parts) + 1)]
            yield from (found.resolve() for one in inner for found in (one.with_suffix(".py"), one / "__init__.py"))


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


Run = Callable[[Sequence[str], float, int], Mapping[str, Trajectory]]
"""(labels, factor on the learning rate, seed) -> their trajectories."""


def steps_factors(
    run: Run,
    labels: Sequence[str],
    base: str,
    share: float,
    *,
    reach: float,
    rates: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    seeds: Sequence[int] = (1, 2, 3),
    tuned_on: Sequence[int] = (0,),
) -> dict[str, StepsFactor]:
    """Tune every row's learning rate in the same way, and compare rows on other seeds by smoothed losses.

    All must reach the loss of ``base`` at ``share`` of its run, with its best rate. A factor is the median over five
    targets around the share, relative to the base on the same seed, as one target, or how fast a seed's weights learn,
    is luck. A single rate is not tuned. ``reach``: steps of smoothing; ``tuned_on``: seeds whose median decides a row's
    rate: near the largest stable rate, one seed is luck.
    """

    def smooth(labels: Sequence[str], rate: float, seed: int) -> dict[str, Trajectory]:
        return {label: found.smoothed(reach) for label, found in run(labels, rate, seed).items()}

    first = tuned_on if len(rates) > 1 else seeds[:1]
    tried = {(rate, seed): smooth(labels, rate, seed) for seed in first for rate in rates}
    last = max(runs[base].steps[-1] for runs in tried.values() if runs[base].steps)
    around = [last * share * near for near in _AROUND]

    def steps_to(row: Trajectory, mark: Trajectory) -> float:
        return statistics.median(_or_never(row.steps_to(mark.loss_at(at))) / at for at in around)

    fastest = {}
    for seed in first:
        bases = [tried[rate, seed][base] for rate in rates]
        fastest[seed] = min((t for t in bases if not t.error), key=lambda t: t.loss_at(around[2]))

    def steps_at(label: str, rate: float) -> float:
        return statistics.median(steps_to(tried[rate, seed][label], fastest[seed]) for seed in first)

    best = {label: min(rates, key=functools.partial(steps_at, label)) for label in labels}
    factors: dict[str, list[float | None]] = {label: [] for label in labels}
    for seed in seeds:
        runs: dict[str, Trajectory] = {}
        for rate in dict.fromkeys(best.values()):
            runs.update(smooth([label for label in labels if best[label] == rate], rate, seed))
        for label in labels:
            factor = steps_to(runs[label], runs[base])
            factors[label].append(None if factor == math.inf else factor)
    return {label: StepsFactor(best[label], tuple(found)) for label, found in factors.items()}


HORIZONS = (0.5, 0.63, 0.8)
"""Shares of a whole run in which DDP is trained too, each with a schedule of its own."""
UPWARD = math.sqrt(2)
_WORSE = 2  # rates in a row that must be worse than the best before the search ends


def best_rate(final: Callable[[float], float]) -> float:
    """Return the factor on the learning rate with the least final loss: upwards, and downwards if that gains nothing.

    The search goes on until two rates in a row are worse than the best.
    """
    found = {1.0: final(1.0)}
    for way in (UPWARD, 1 / UPWARD):
        rate, worse = 1.0, 0
        while worse < _WORSE:
            rate *= way
            least, found[rate] = min(found.values()), final(rate)
            worse = 0 if found[rate] < least else worse + 1
        if min(found, key=lambda tried: found[tried]) > 1.0:
            break
    return min(found, key=lambda tried: found[tried])


@dataclass(frozen=True)
class WholeRun:
    """Final held-out losses of a row's whole runs by seed, at its best factor on the rate; infinite: it failed."""

    rate: float
    finals: tuple[float, ...]

    @property
    def final(self) -> float:
        return statistics.median(self.finals)


Whole = Callable[[str, float, int, float], Trajectory]
"""(label, factor on the learning rate, seed, share of the steps) -> a run with a schedule of its own length."""


def whole_runs(
    run: Whole,
    labels: Sequence[str],
    seeds: int,
    *,
    rates: Sequence[float] = (),
    known: tuple[WholeRun, float] | None = None,
) -> tuple[dict[str, WholeRun], float]:
    """Train rows, DDP first, over whole schedules; rates are tuned on seed 0. Return them, and the power of DDP's law.

    By that law, through DDP's finals at ``HORIZONS``, DDP's final loss falls as steps to the power of minus that.
    ``rates``: the best of these factors is taken, instead of one that is searched. ``known``: DDP and its power, which
    then is not trained.
    """

    def final(label: str, rate: float, seed: int = 0, share: float = 1.0) -> float:
        losses = run(label, rate, seed, share).losses
        return losses[-1] if losses and math.isfinite(losses[-1]) else math.inf

    found, power = ({}, math.nan) if known is None else ({BASE: known[0]}, known[1])
    for label in labels:
        if label in found:
            continue
        mine = functools.partial(final, label)
        rate = min(rates, key=mine) if rates else best_rate(mine)
        found[label] = WholeRun(rate, tuple(final(label, rate, seed) for seed in range(seeds)))
        if label == BASE:
            marks = [(share, final(BASE, rate, 0, share)) for share in HORIZONS]
            power = power_of([*marks, (1.0, found[BASE].finals[0])])
    return found, power


def power_of(marks: Sequence[tuple[float, float]]) -> float:
    """Return the c of loss = b steps^-c with the least squares in logarithms."""
    steps, losses = ([math.log(value) for value in column] for column in zip(*marks))
    return -statistics.linear_regression(steps, losses).slope


def whole_factors(found: Mapping[str, WholeRun], power: float) -> dict[str, StepsFactor]:
    """Return how many times DDP's steps each row needs, by seed: DDP's whole run is one."""
    base = found[BASE].finals
    return {
        label: StepsFactor(
            row.rate,
            tuple((mine / its) ** (1 / power) if math.isfinite(mine) else None for mine, its in zip(row.finals, base)),
        )
        for label, row in found.items()
    }


@dataclass(frozen=True)
class TrainingBudget:
    """Steps of every run; rates tried on seed 0, which then does not count in the end; seeds that are compared."""

    steps: int
    rates: tuple[float, ...]
    seeds: int

    @property
    def every(self) -> int:
        return max(1, self.steps // _POINTS)

    @property
    def reach(self) -> int:
        """Steps on either side of a point over which its loss is averaged."""
        return 2 * self.every

    @property
    def rounds(self) -> int:
        return self.seeds + (len(self.rates) > 1)

    def judged_on(self, round_: int) -> tuple[int, ...]:
        """Return the seeds that count in a round, numbered from 0: in the first, the one on which rates are tried."""
        first = int(len(self.rates) > 1 and round_ > 0)
        return tuple(range(first, round_ + 1))

    def row_runs(self, rows: int) -> list[tuple[int, int]]:
        plan = []
        for round_ in range(self.rounds):
            plan.append((rows, 1 if round_ else len(self.rates)))
            rows = kept(rows)
        return plan


def kept(rows: int) -> int:
    """Return how many rows go on: the better half, and at least two, so that the first has a rival."""
    return min(rows, max(2, math.ceil(rows / 2)))


def fit(
    base: float, others: Sequence[float], seconds: float, *, start: float, seeds: int | None = None
) -> TrainingBudget | None:
    """Return what can be trained in ``seconds``; None if not even a short run of every row fits.

    If there is time, learning rates are tried; then come more seeds (up to three), then more steps. ``base``,
    ``others``: seconds of a step without a slow link; ``start``: seconds until ranks train.
    """
    dearest = sorted(others, reverse=True)  # assume the most expensive rows go on, as an upper bound
    wished = [(RATES, 3), ((1.0,), 3), ((1.0,), 2), ((1.0,), 1)] if seeds is None else [(RATES, seeds), ((1.0,), seeds)]
    for place, (rates, count) in enumerate(wished):
        budget = TrainingBudget(0, rates, count)
        plan = budget.row_runs(len(dearest))
        per_step = sum(runs * (base + sum(dearest[:rows])) for rows, runs in plan)
        sessions = sum(runs if number == 0 else len(rates) for number, (_, runs) in enumerate(plan))
        steps = min(MOST, int((seconds - sessions * start) / per_step))
        if steps >= (FEWEST if place == len(wished) - 1 else ENOUGH):
            return replace(budget, steps=steps // 8 * 8)
    return None


def halve(
    run: Run,
    labels: Sequence[str],
    seconds_to_loss: Callable[[str, StepsFactor], float],
    budget: TrainingBudget,
    goes_on: Callable[[int, Sequence[str]], bool] = lambda round_, labels: True,
) -> dict[str, StepsFactor]:
    """Return the steps factor of every row, on all seeds for which the row was in the race.

    Successive halving: every round compares rows on one more seed, and only the better half goes on.
    ``seconds_to_loss`` is infinite where the loss is not reached; ``goes_on`` is asked before each round but the first.
    """
    alive, found = list(labels), dict[str, StepsFactor]()
    for round_ in range(budget.rounds):
        if round_ and (not alive or not goes_on(round_, alive)):
            break
        rows, seeds = [BASE, *alive], budget.judged_on(round_)
        measured = steps_factors(run, rows, BASE, SHARE, reach=budget.reach, rates=budget.rates, seeds=seeds)
        base = measured[BASE]
        found[BASE] = StepsFactor(base.rate, (1.0,) * len(base.factors))
        for label in alive:
            pairs = zip(measured[label].factors, base.factors)
            over = tuple(None if mine is None or not its else mine / its for mine, its in pairs)
            found[label] = StepsFactor(measured[label].rate, over)
        there = [label for label in alive if math.isfinite(seconds_to_loss(label, found[label]))]
        alive = sorted(there, key=lambda label: seconds_to_loss(label, found[label]))[: kept(len(alive))]
    return found
