"""The demonstration: the same model, text and weights under DDP, exact and compressed; loss against seconds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from thinwire.bench.record import Point, RowRecord, RunRecord
from thinwire.bench.rows import Row
from thinwire.bench.spec import BenchSpec
from thinwire.bench.summary import BenchResult, summarise

ROWS = (Row("ddp", "ddp"), Row("thinwire ssgd", "ssgd"), Row("thinwire powersgd", "powersgd", {"rank": 4}))
_TOLD = 0.01  # nats: less is no lead


@dataclass(frozen=True)
class DemoRow:
    """One line of the demonstration's table.

    Attributes:
        predicted_seconds: step on the link that could not be emulated; None where it was measured.
    """

    label: str
    steps: int
    seconds: float
    step_seconds: float
    bytes_per_step: float | None
    bytes_source: str
    loss_at_equal_steps: float | None
    loss_at_equal_seconds: float | None
    predicted_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class DemoResult:
    """All rows, the points that were equal, and the bench figures they come from."""

    bench: BenchResult
    equal_steps: int
    equal_seconds: float
    rows: tuple[DemoRow, ...]
    curves: dict[str, list[Point]]


def demo_spec(*, quick: bool, link: str, link_bits: int, steps: int) -> BenchSpec:
    """What the demonstration runs."""
    return BenchSpec(
        model="chargpt:layers=4:width=160:heads=4" if quick else "chargpt:width=352:heads=8:batch=2",
        rows=ROWS,
        workers=2 if quick else 4,
        link=link,
        link_bits=link_bits,
        steps=steps,
        warmup=0,
        curves=True,
        every=5,
        seconds_as=True,
        timeout_seconds=600.0,
    )


def judge_demo(spec: BenchSpec, record: RunRecord, *, emulated: bool, note: str) -> DemoResult:
    """Losses at equal steps and at equal seconds."""
    bench = summarise(spec, record, emulated=emulated, note=note)
    trained = [row for row in record.rows if row.curve]
    whole = [row for row in trained if not row.error]
    equal_steps = min((row.curve[-1].step for row in whole), default=0)
    equal_seconds = min((row.curve[-1].seconds for row in whole), default=0.0)
    rows = tuple(
        _demo_row(row, spec, bench, equal_steps, equal_seconds) for row in record.rows if row.kind != "compute"
    )
    return DemoResult(bench, equal_steps, equal_seconds, rows, {row.label: row.curve for row in trained})


def _demo_row(row: RowRecord, spec: BenchSpec, bench: BenchResult, steps: int, seconds: float) -> DemoRow:
    step = statistics.median(row.step_seconds) if row.step_seconds else 0.0
    predicted = None
    if not bench.emulated and spec.link_bits and row.wire_bytes is not None and row.step_seconds:
        wire = row.wire_bytes * 8 / spec.link_bits
        predicted = max(bench.compute_seconds, bench.forward_seconds + wire)
    good = not row.error and bool(row.curve)
    return DemoRow(
        label=row.label,
        steps=len(row.losses),
        seconds=sum(row.step_seconds),
        step_seconds=step,
        bytes_per_step=row.wire_bytes,
        bytes_source=row.wire_source,
        loss_at_equal_steps=at(row.curve, "step", steps) if good else None,
        loss_at_equal_seconds=at(row.curve, "seconds", seconds) if good else None,
        predicted_seconds=predicted,
        error=row.error,
    )


def advice(result: DemoResult) -> str:
    """What to write into a script, by the losses at equal seconds that the table shows; or why nothing."""
    found = {row.label: row.loss_at_equal_seconds for row in result.rows if row.loss_at_equal_seconds is not None}
    ddp = found.pop("ddp", None)
    if ddp is None or not found:
        return ""
    best = min(found, key=lambda label: found[label])
    if found[best] > ddp - _TOLD:
        return (
            f"After {result.equal_seconds:.0f} s no row was ahead of DDP, so there is nothing to change for a network "
            "like this one. For yours: thinwire plan --help"
        )
    row = next(row for row in ROWS if row.label == best)
    options = "".join(f", {name}={value!r}" for name, value in row.options.items())
    return (
        f"After {result.equal_seconds:.0f} s {best} was first: {found[best]:.3f} against {ddp:.3f}. "
        f"In your own script, before the loop:\n\nimport thinwire as tw\n"
        f'sync = tw.attach(model, optimizer, "{row.kind}"{options})'
    )


def at(curve: list[Point], axis: str, where: float) -> float:
    """The curve's loss (held-out where there is one) at a step or a second, linear between points."""
    points = [(float(getattr(p, axis)), p.loss if p.validation is None else p.validation) for p in curve]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= where <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (where - x0) / (x1 - x0)
    return points[-1][1] if where > points[0][0] else points[0][1]
