"""A run of the bench: its settings, its record, and the parent that starts the ranks and follows their progress."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from thinwire.core.checks import check_count
from thinwire.core.events import LastWords, python
from thinwire.core.records import Record
from thinwire.tools.bench.rows import Row


@dataclass(frozen=True)
class BenchSpec(Record):
    """One comparison: ``rounds`` turns of ``steps`` timed steps per row, after ``warmup`` untimed ones (later: one).

    With ``curves`` each row trains for a curve with a point every ``every`` steps; with ``loss_as`` too, rows after the
    first train until they reach its last loss, for at most as many seconds. With ``target``, a held-out loss, rows
    train in turns of ``every`` steps until they reach it or have made ``steps``. ``rate_factor`` multiplies learning
    rates; with ``schedule`` they rise and fall over ``steps``. ``operation_seconds`` is the time-out of one collective;
    ``link_bits`` None: no limit. ``speeds``: of the ranks beside the fastest, 1; (): all are as fast.
    """

    called: ClassVar[str] = "the settings of a bench run"
    model: str
    rows: tuple[Row, ...]
    workers: int = 2
    link: str | None = None
    link_bits: int | None = None
    steps: int = 10
    rounds: int = 3
    warmup: int = 3
    seed: int = 0
    curves: bool = False
    every: int = 5
    loss_as: bool = False
    operation_seconds: float = 300.0
    timeout_seconds: float = 3600.0
    predict: bool = False
    ranks_per_node: int = 1
    target: float | None = None
    rate_factor: float = 1.0
    device: str = "cpu"
    schedule: bool = False
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("workers", "ranks_per_node", "steps", "rounds", "warmup", "every"):
            check_count(name, getattr(self, name), 0 if name == "warmup" else 1)
        if not (0 < self.timeout_seconds < math.inf and 0 < self.operation_seconds < math.inf):
            raise ValueError("time-outs must be positive and finite")


@dataclass
class Point:
    """One point of a training curve: seconds of training so far, smoothed training loss, held-out loss."""

    step: int
    seconds: float
    loss: float
    validation: float | None = None

    @property
    def judged(self) -> float:
        """The loss by which rows are compared: held-out loss, or training loss if nothing is held out."""
        return self.loss if self.validation is None else self.validation


@dataclass
class RowRecord:
    """The measurements of one row: per timed step seconds until the last rank has ended it, of forward, and of the CPU.

    ``losses``: one per step from the first, warm-up included, mean over ranks. ``wire_bytes`` per step: mean over nodes
    ("interface") or ranks ("stats", "formula"). ``untimed_seconds``: warm-up and measuring for a plan.
    ``waited_seconds``: how long rank 0's backward and forward waited in a step. ``why[0]`` names what ``auto`` chose.
    ``plan``: JSON of what the link has decided, and with it the losses: how much is sent of each gradient, or the
    period, delay and codec of local steps.
    """

    label: str
    kind: str
    family: str = ""
    step_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire_bytes: float | None = None
    wire_source: str = ""
    host_seconds: list[float] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    predicted_seconds: float | None = None
    error: str = ""
    untimed_seconds: float = 0.0
    waited_seconds: tuple[float, float] | None = None
    why: list[str] = field(default_factory=list)
    plan: str = ""


@dataclass
class RunRecord(Record):
    """All rows of one run, and what they share: written by rank 0, read by the parent."""

    called: ClassVar[str] = "the record of a bench run"
    describe: str
    parameters: int
    tensors: int
    gradient_bytes: int
    workers: int
    interface: str | None
    rows: list[RowRecord]


def seconds_to(curve: list[Point], target: float) -> float | None:
    """Return when a curve first is at or below a loss, linear between points; None if it never is."""
    return reached(((p.seconds, p.judged) for p in curve), target)


def reached(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """Return where (place, loss) first is at or below a loss, linear between points; None if it never is."""
    start, above = 0.0, math.nan  # place and loss of the previous point
    for place, loss in points:
        if loss <= target:
            share = 1.0 if math.isnan(above) else (above - target) / (above - loss)
            return start + (place - start) * share
        start, above = place, loss
    return None


Progress = Callable[[dict[str, Any]], None]
REFUSED = "refused"  # key of an event: why a rank cannot build the model


class BenchError(RuntimeError):
    """The ranks ended without a record."""


class Launched(Protocol):
    """How a launch ended (124: time ran out), whether links were emulated, how it ran in one sentence."""

    @property
    def exit_code(self) -> int: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def note(self) -> str: ...


Launch = Callable[..., Launched]
"""Runs a command once per worker, with torchrun's variables set; takes ``on_line`` and ``timeout_seconds``."""


def run_session(
    spec: BenchSpec, launch: Launch, on_progress: Progress = lambda event: None
) -> tuple[RunRecord, Launched]:
    refused: list[str] = []

    def follow(rank: int, event: dict[str, Any]) -> None:
        if REFUSED in event:
            refused.append(event[REFUSED])
        else:
            on_progress(event)

    words = LastWords(follow)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        out = Path(folder) / "record.json"
        command = python("-m", "thinwire.tools.bench.worker", spec.to_json(), str(out))
        slow = {"slow": {rank: 1 / speed for rank, speed in enumerate(spec.speeds)}} if spec.speeds else {}
        launched = launch(command, on_line=words, timeout_seconds=spec.timeout_seconds, **slow)
        if launched.exit_code == 0 and out.exists():
            return RunRecord.from_json(out.read_text()), launched
    if launched.exit_code == 124:
        raise BenchError(
            f"the run took longer than {spec.timeout_seconds:g} s and was stopped; use fewer --steps or raise --timeout"
        )
    if refused:
        raise BenchError(refused[0])
    raise BenchError(words.after(f"the ranks ended with exit code {launched.exit_code}"))
