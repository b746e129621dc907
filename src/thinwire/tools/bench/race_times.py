"""The settings of a race, and its first measurement: the seconds of every row's steps on the link."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.core.methods.registry import METHODS, method
from thinwire.engine.local.settings import named_local
from thinwire.predict.measure.kernels import settle
from thinwire.tools.bench.device import names_of_cards
from thinwire.tools.bench.finish import Pace, pace_of
from thinwire.tools.bench.functions import told
from thinwire.tools.bench.halving import BASE, FEWEST
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.race import (
    cache_folder,
    digest_of,
    own_digest,
    recalled,
    remember,
    text_digest,
)
from thinwire.tools.bench.record import RowRecord, RunRecord
from thinwire.tools.bench.rows import COMPUTE, Row
from thinwire.tools.bench.session import BenchError, Launch, Progress, run_session
from thinwire.tools.bench.spec import BenchSpec
from thinwire.tools.bench.words import split_options

SPEND = 0.8  # of the time is planned; the rest is for evaluations and slower phases
_WARMUP = 3  # steps before timed ones: for initial exact steps, and connections


@dataclass(frozen=True)
class RaceSpec:
    """The settings of a race.

    Attributes:
        model: as the bench reads it.
        rows: rows that race against DDP.
        longer: (ratio, row) pairs: more rows, which race only where a step of DDP sends for that many times as long as
            it computes.
        workers, ranks_per_node, link, link_bits, delay: the cluster; ``link_bits`` None: no limit.
        minutes: time limit.
        seeds: number of seeds on which rows are compared; None: as many as fit.
        device: "cpu" or "cuda", where the ranks compute.
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
    device: str = "cpu"
    longer: tuple[tuple[float, Row], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes {self.minutes:g} must be above 0, for example 10")
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds} must be at least 1")
        if self.workers < 2:
            raise ValueError(f"--workers {self.workers}: a race needs at least 2, as one has no one to exchange with")
        object.__setattr__(
            self, "rows", (Row(BASE, BASE), *(row for row in self.rows if row.label not in (BASE, COMPUTE)))
        )

    @property
    def key(self) -> str:
        """A digest of everything that determines seconds per step, including this machine."""
        told = {**asdict(self), "minutes": None, "seeds": None, "text": text_digest(), "machine": platform.node()}
        if self.device != "cpu":
            told["cards"] = names_of_cards()
        name = split_options(self.model)[0]
        return digest_of({**told, "model's text": own_digest(name) if ":" in name else ""})


@dataclass(frozen=True)
class Course:
    """Where a race is run, and who is informed.

    Attributes:
        on_link, apart: launchers of ranks on the links, and of ranks without a slow link.
        tell: called with (what is being measured, number of steps).
        on_progress: called with progress of the ranks.
        folder: where results are kept; None: the user's cache.
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

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LinkTimes:
        """Return the times that ``asdict`` was given."""
        return cls(**{**data, "record": RunRecord.from_data(data["record"])})

    @property
    def compute(self) -> RowRecord:
        """The row without exchange."""
        return next(row for row in self.record.rows if row.kind == COMPUTE)

    @property
    def start_seconds(self) -> float:
        """Seconds until the ranks train."""
        steps = sum(row.untimed_seconds + sum(row.step_seconds) for row in self.record.rows)
        return max(0.0, self.wall_seconds - steps)

    def paces(self) -> dict[str, Pace]:
        """Return the pace of every row, by label."""
        return {row.label: pace_of(row, self.turns, self.compute) for row in self.record.rows}


def measure(asked: RaceSpec, course: Course) -> LinkTimes:
    """Return every row's seconds per step: as already known for this machine, or measured now.

    Raises:
        BenchError: the model or DDP does not train, or not within the time limit.
        ValueError: the user's loss fails.
    """
    place = (course.folder or cache_folder()) / f"measured-{asked.key}.json"
    if (known := recalled(place, LinkTimes.from_data)) is not None:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(place.stat().st_mtime))
        return replace(known, known_since=since)
    course.tell("computing time of a step", 1)
    alone, gradient_bytes = _computing(asked)
    wire = _wire_seconds(asked, gradient_bytes)
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
    course.tell(f"seconds per step on {asked.link or 'a link without a limit'}", total)
    began = time.monotonic()
    record, launched = run_session(spec, course.on_link, course.on_progress)
    found = LinkTimes(record, turns, time.monotonic() - began, launched.emulated, launched.note)
    for label, what in ((COMPUTE, "the model does not train"), (BASE, "DDP does not train this model")):
        if error := next(row.error for row in record.rows if row.label == label):
            raise BenchError(f"{what}: {error}")
    remember(place, asdict(found))
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


def _wire_seconds(asked: RaceSpec, gradient_bytes: int) -> float:
    """Return for how long the link is busy with an exact average."""
    nodes = asked.workers // asked.ranks_per_node
    return 2 * (nodes - 1) / nodes * gradient_bytes * 8 / asked.link_bits if asked.link_bits else 0.0


def _timed(asked: RaceSpec, alone: float, wire: float) -> tuple[int, int] | None:
    """Return (steps, turns): two turns within a fifth of the time, or a short one within two fifths, or None."""
    seconds = 60 * asked.minutes
    for steps in range(10, 1, -1):
        if _timing_seconds(asked, steps, 2, alone, wire) <= 0.2 * seconds:
            return steps, 2
    return (2, 1) if _timing_seconds(asked, 2, 1, alone, wire) <= 0.4 * seconds else None


def _timing_seconds(asked: RaceSpec, steps: int, turns: int, alone: float, wire: float) -> float:
    """Estimate for how long all rows are timed, by the traffic of exact averages."""
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
    """Return the steps that a row makes in that many turns, in whole periods."""
    period = period_of(row)
    parts = [_WARMUP, *[1] * (turns - 1), *[steps] * turns]
    return sum(-(-part // period) * period for part in parts)


def period_of(row: Row) -> int:
    """Return after how many steps the row exchanges; 1 if that is in every step, or not known beforehand."""
    settings = named_local(row.kind, row.options)
    return settings.sync_every if settings is not None and isinstance(settings.sync_every, int) else 1


def is_exact(row: Row) -> bool:
    """Return whether its steps are worth the same as DDP's, since they are the same up to rounding."""
    if row.kind in METHODS:
        return method(row.kind, **row.options).exact
    return row.kind == BASE or (row.kind == "auto" and not row.options.get("lossy", False))
