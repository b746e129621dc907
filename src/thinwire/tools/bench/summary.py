"""From records to figures: medians, spreads, exposed communication, the floor; and their table and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from thinwire.core.program import Method
from thinwire.core.records import Record
from thinwire.core.words import counted, duration, megabytes, times
from thinwire.predict.choose.worth import shipped
from thinwire.predict.timeline.local_steps import OneWorker, Periodic
from thinwire.tools.bench.rows import COMPUTE, priced
from thinwire.tools.bench.session import BenchError, BenchSpec, Point, RowRecord, RunRecord, reached
from thinwire.tools.pictures import Level, Panel, Picture, Series

SMOOTH = 5


@dataclass(frozen=True)
class RowSummary:
    """One line of the table: medians over steps; ``spread_seconds`` is the interquartile range.

    ``worth``: how many times as soon N workers reach a loss as one alone, by these steps and the planner's table of
    what a step is worth. ``exposed_seconds``: beyond a step without exchange. ``bytes_source``: "interface" (per node,
    headers included), "stats" (thinwire's ledger, per rank) or "formula" (per rank). ``loss``: mean of the last
    training losses. ``variants``: label -> step seconds of its family, of which it is the fastest. ``waited_*``: what
    rank 0 waited in a step.
    """

    label: str
    step_seconds: float | None = None
    spread_seconds: float | None = None
    exposed_seconds: float | None = None
    bytes_per_step: float | None = None
    bytes_source: str = ""
    host_seconds: float | None = None
    loss: float | None = None
    loss_steps: int = 0
    speedup: float | None = None
    worth: float | None = None
    predicted_seconds: float | None = None
    waited_backward_seconds: float | None = None
    waited_forward_seconds: float | None = None
    variants: dict[str, float] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class BenchResult(Record):
    """The whole comparison; ``floor_seconds`` is below every exact method that ends with backward.

    If the links were not ``emulated``, the link is only used to compute the floor.
    """

    called: ClassVar[str] = "a comparison of thinwire's"
    alone: ClassVar[bool] = False

    model: str
    describe: str
    parameters: int
    tensors: int
    gradient_bytes: int
    workers: int
    link: str | None
    emulated: bool
    note: str
    compute_seconds: float
    forward_seconds: float
    floor_seconds: float
    rows: tuple[RowSummary, ...]

    def row(self, label: str) -> RowSummary:
        for row in self.rows:
            if row.label == label:
                return row
        for row in self.rows:
            if row.label.startswith(label + " "):
                return row
        raise KeyError(label)


def floor(compute: float, forward: float, ring_bytes: float, bits_per_second: int | None) -> float:
    """Return the lower bound of a step's seconds if the average must be complete at the end of backward."""
    return compute if not bits_per_second else max(compute, forward + ring_bytes * 8 / bits_per_second)


def summarise(spec: BenchSpec, record: RunRecord, *, emulated: bool, note: str) -> BenchResult:
    """Return the figures of a run; raise ``BenchError`` if even training without exchange failed."""
    compute_row = next(row for row in record.rows if row.kind == COMPUTE)
    if compute_row.error:
        raise BenchError(f"the model does not train: {compute_row.error}")
    compute = statistics.median(compute_row.step_seconds)
    forward = statistics.median(compute_row.forward_seconds)
    baseline = next((r for r in record.rows if r.label == "ddp" and not r.error and r.step_seconds), None)
    reference = statistics.median(baseline.step_seconds) if baseline else None
    steps = _steps_of(spec, record)
    nodes = max(1, record.workers // spec.ranks_per_node)  # sums inside a node do not use its link
    ring = 2 * (nodes - 1) / nodes * record.gradient_bytes
    return BenchResult(
        model=spec.model,
        describe=record.describe,
        parameters=record.parameters,
        tensors=record.tensors,
        gradient_bytes=record.gradient_bytes,
        workers=record.workers,
        link=spec.link,
        emulated=emulated,
        note=note,
        compute_seconds=compute,
        forward_seconds=forward,
        floor_seconds=floor(compute, forward, ring, spec.link_bits),
        rows=tuple(
            _summary(row, variants, compute, reference, steps(row))
            for row, variants in families(record.rows, spec.rounds)
        ),
    )


def _steps_of(spec: BenchSpec, record: RunRecord) -> Callable[[RowRecord], float]:
    """Return what gives the steps to a loss of a row over those of one worker alone; infinite: not known."""
    told, known = {row.label: row for row in spec.rows}, shipped()

    def steps(method: Method) -> float:
        return known(method, record.parameters, record.workers).middle

    alone = steps(OneWorker())

    def steps_of(row: RowRecord) -> float:
        if row.kind == COMPUTE:
            return 1.0
        if row.kind in ("ddp", "ddp-fp16"):
            return 1 / alone
        asked = told.get(row.label)
        method = None if asked is None else priced(replace(asked, plan=row.plan))
        chosen = not isinstance(method, Periodic) or (method.every is not None and method.delay != "auto")
        return steps(method) / alone if method is not None and chosen else math.inf

    return steps_of


def _summary(
    row: RowRecord, variants: dict[str, float], compute: float, reference: float | None, steps: float
) -> RowSummary:
    if row.error or not row.step_seconds:
        return RowSummary(row.label, variants=variants, error=row.error or "no step was timed")
    step = statistics.median(row.step_seconds)
    quarters = (
        statistics.quantiles(row.step_seconds, n=4, method="inclusive") if len(row.step_seconds) > 1 else [step] * 3
    )
    backward, forward = row.waited_seconds or (None, None)
    return RowSummary(
        label=row.label,
        step_seconds=step,
        spread_seconds=quarters[2] - quarters[0],
        exposed_seconds=step - compute,
        bytes_per_step=row.wire_bytes,
        bytes_source=row.wire_source,
        host_seconds=statistics.median(row.host_seconds),
        loss=statistics.fmean(row.losses[-SMOOTH:]) if row.kind != COMPUTE else None,
        loss_steps=len(row.losses),
        speedup=reference / step if reference else None,
        worth=compute / (step * steps) if math.isfinite(steps) else None,
        predicted_seconds=row.predicted_seconds,
        waited_backward_seconds=backward,
        waited_forward_seconds=forward,
        variants=variants,
        why=tuple(row.why),
    )


def families(rows: Sequence[RowRecord], rounds: int) -> list[tuple[RowRecord, dict[str, float]]]:
    """Return all rows, of each family only the fastest, with the median seconds of its members by label.

    The minimum of noisy medians lies below the true time of every variant, so a rival chosen and timed by the same
    steps would look too fast: each round counts the variant that was fastest in the others.
    """
    found: list[tuple[RowRecord, dict[str, float]]] = []
    seen: set[str] = set()
    for row in rows:
        if not row.family:
            found.append((row, {}))
        elif row.family not in seen:
            seen.add(row.family)
            steps = {r.label: r for r in rows if r.family == row.family and not r.error and r.step_seconds}
            times = {label: statistics.median(r.step_seconds) for label, r in steps.items()}
            best = steps[min(times, key=times.__getitem__)] if times else row
            timed = chosen_elsewhere({label: r.step_seconds for label, r in steps.items()}, rounds)
            found.append((replace(best, step_seconds=timed or best.step_seconds), times))
    return found


def chosen_elsewhere(seconds: Mapping[str, Sequence[float]], rounds: int) -> list[float]:
    """Return each round's steps of the variant with the lowest median over the others; none if steps are missing."""
    counts = {len(steps) for steps in seconds.values()}
    if rounds < 2 or len(seconds) < 2 or len(counts) != 1 or (count := counts.pop()) % rounds:
        return []
    each = count // rounds
    found: list[float] = []
    for begin in range(0, count, each):
        end = begin + each
        others = {label: statistics.median([*s[:begin], *s[end:]]) for label, s in seconds.items()}
        found += seconds[min(others, key=others.__getitem__)][begin:end]
    return found


class WholeTable(Table):
    """A table that becomes a list, a line for each value, on a screen that is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [[_plain(console, cell) for cell in (column.header, *column.cells)] for column in self.columns]
        needed = 0
        for column, texts in zip(self.columns, columns):
            most = 24 if column.justify == "right" else 12  # more is a sentence or a name, which may be folded
            widest = max(cell_len(line) for text in texts for line in text.split("\n"))
            needed += min(most, widest) + 1 + self.padding[1]
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        heads, *rows = zip(*columns)
        yield Text(f"{self.title}\n")
        for row in rows:
            yield Text(row[0], style="bold")
            for head, text in zip(heads[1:], row[1:]):
                if text.strip():
                    yield Text(f"  {head}: {text}".replace("\n", " "))


def _plain(console: Console, cell: RenderableType) -> str:
    return console.render_str(cell).plain if isinstance(cell, str) else str(cell)


def bench_table(result: BenchResult) -> RenderableType:
    table = WholeTable(title=_title(result), title_justify="left")
    table.add_column("method")
    predicted = any(row.predicted_seconds is not None for row in result.rows)
    for name in ("step", "spread", "exposed", "MB/step", "loss", "worth", *(["predicted"] if predicted else [])):
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(*_cells(row), *([duration(row.predicted_seconds)] if predicted else []))
    return Group(table, *(Text(line) for line in _notes(result)))


def _title(result: BenchResult) -> str:
    link = result.link or "no limit"
    if result.link and not result.emulated:
        link += " (NOT emulated)"
    workers = counted(result.workers, "worker")
    return f"{result.describe}; {result.parameters / 1e6:.1f} M parameters; {workers}; link {link}"


def _cells(row: RowSummary) -> list[str | Text]:
    if row.error:
        return [row.label, Text(f"failed: {row.error}", style="red")]
    loss = "-" if row.loss is None else f"{row.loss:.3f}"
    worth = "-" if row.worth is None else times(row.worth)
    source = {"interface": "", "stats": " (l)", "formula": " (f)"}.get(row.bytes_source, "")
    return [
        row.label,
        duration(row.step_seconds),
        duration(row.spread_seconds),
        duration(row.exposed_seconds),
        megabytes(row.bytes_per_step) + (source if row.bytes_per_step is not None else ""),
        loss,
        worth,
    ]


def _notes(result: BenchResult) -> list[str]:
    steps = {row.loss_steps for row in result.rows if row.loss is not None}
    notes = [
        f"compute alone {duration(result.compute_seconds)}, its forward {duration(result.forward_seconds)}; "
        f"floor of an exact method that ends with backward: {duration(result.floor_seconds)}"
        " = max(compute, forward + ring bytes / rate)",
        "step: until the last rank has ended it, median over steps; spread: interquartile; "
        "exposed: step - compute alone",
    ]
    notes.append(
        f"worth: how many times as soon {counted(result.workers, 'worker')} reach a loss as one alone, by these steps "
        "and by how many a method needed in recorded runs; thinwire race trains to the loss"
    )
    if steps:
        notes.append(f"loss: training loss after {min(steps)} steps, same weights and data at the start")
    sources = {row.bytes_source for row in result.rows if row.bytes_per_step is not None}
    meaning = {
        "interface": "MB/step: what a node's interface sent, headers included",
        "stats": "(l): thinwire's own ledger, per rank",
        "formula": "(f): ring formula, per rank, not measured",
    }
    notes += [text for source, text in meaning.items() if source in sources]
    for row in result.rows:
        if row.variants:
            notes.append("tried: " + ", ".join(f"{name} {duration(s)}" for name, s in row.variants.items()))
        if row.label.startswith("auto") and row.why:
            notes.append(f"{row.label}: {row.why[0].removeprefix('auto: ')}")
    if result.link and not result.emulated:
        notes.append(f"the link was not emulated: {result.note}")
    return notes


def bench_picture(result: BenchResult) -> Picture:
    """Draw each row's step as compute, and what of the exchange it adds."""
    rows = [row for row in result.rows if row.step_seconds is not None]
    places = tuple(map(float, range(len(rows))))
    compute = tuple(min(result.compute_seconds, row.step_seconds or 0.0) for row in rows)
    exposed = tuple(max(row.exposed_seconds or 0.0, 0.0) for row in rows)
    bars = (Series("compute alone", places, compute, "bars"), Series("exposed communication", places, exposed, "bars"))
    floor = (Level(result.floor_seconds, "floor, exact methods"),)
    title = f"{result.model}, {counted(result.workers, 'worker')}, link {result.link or 'no limit'}"
    panel = Panel("", "seconds per step", bars, levels=floor, x_names=tuple(row.label for row in rows))
    return Picture(title, (panel,))


def loss_picture(
    curves: Mapping[str, Sequence[Point]], title: str, target: float | None = None, *, log: bool = False,
    against: str = "seconds",
) -> Picture:  # fmt: skip
    """Draw held-out loss (or training loss if there is none) against seconds of training, with a mark where each row
    reaches ``target``, or against "steps"; ``log``: on a logarithmic axis, on which no line begins at 0.
    """
    lines = []
    for label, points in curves.items():
        shown = [p for p in points if not math.isnan(p.judged) and (p.seconds > 0 or not log)]
        x = tuple(p.seconds if against == "seconds" else float(p.step) for p in shown)
        y = tuple(p.judged for p in shown)
        there = None if target is None else reached(((p.seconds, p.judged) for p in points), target)
        if there is None or target is None:
            lines.append(Series(label, x, y))
        else:
            lines.append(Series(label, x, y, at=(there, target), said=f"{there:.3g} s"))
    held_out = any(point.validation is not None for points in curves.values() for point in points)
    panel = Panel(
        "steps" if against == "steps" else "seconds of training, start-up included" if log else "seconds of training",
        "loss on held-out data" if held_out else "training loss",
        tuple(lines),
        levels=() if target is None else (Level(target, f"loss {target:.3f}"),),
        log_x=log,
    )
    return Picture(title, (panel,))
