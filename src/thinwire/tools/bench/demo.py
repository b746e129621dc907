"""The demonstration: the same model, text and weights with DDP and compressed, each until DDP's final loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.session import BenchSpec, Point, RowRecord, RunRecord, reached, seconds_to
from thinwire.tools.bench.summary import BenchResult, summarise
from thinwire.tools.bench.words import attach_line

ROWS = (Row("ddp", "ddp"), Row("thinwire powersgd", "powersgd", {"rank": 4}))
_LEAD = 0.9  # of DDP's seconds: a time above this is no lead


@dataclass(frozen=True)
class DemoRow:
    """``steps``, ``seconds`` until the loss reached DDP's, None: never. With ``predicted_seconds`` (of a step, where
    the link could not be emulated) ``seconds`` is computed from it."""

    label: str
    step_seconds: float
    bytes_per_step: float | None
    bytes_source: str
    steps: float | None
    seconds: float | None
    predicted_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class DemoResult:
    """All rows, DDP's final loss, and the bench figures behind them."""

    bench: BenchResult
    target: float | None
    rows: tuple[DemoRow, ...]
    curves: dict[str, list[Point]]

    @property
    def times_sooner(self) -> float | None:
        """DDP's seconds over those of the fastest other row; None if no other row reached the loss or DDP failed."""
        ddp, first = self.row("ddp"), self.first
        if ddp is None or ddp.seconds is None or first is None or first.seconds is None:
            return None
        return ddp.seconds / first.seconds

    @property
    def ahead(self) -> bool:
        return self.times_sooner is not None and self.times_sooner * _LEAD >= 1

    @property
    def first(self) -> DemoRow | None:
        there = [row for row in self.rows if row.label != "ddp" and row.seconds is not None]
        return min(there, key=lambda row: row.seconds or 0.0, default=None)

    def row(self, label: str) -> DemoRow | None:
        return next((row for row in self.rows if row.label == label), None)


def demo_spec(*, quick: bool, link: str, link_bits: int, steps: int) -> BenchSpec:
    return BenchSpec(
        model="chargpt:layers=4:width=160:heads=4" if quick else "chargpt:width=352:heads=8:batch=2",
        rows=ROWS,
        workers=2 if quick else 4,
        link=link,
        link_bits=link_bits,
        steps=steps,
        warmup=0,
        curves=True,
        every=3,
        loss_as=True,
        timeout_seconds=600.0,
    )


def judge_demo(spec: BenchSpec, record: RunRecord, *, emulated: bool, note: str) -> DemoResult:
    """Return steps and seconds of every row until the loss that DDP ended with."""
    bench = summarise(spec, record, emulated=emulated, note=note)
    curves = {row.label: row.curve for row in record.rows if row.curve}
    target = next((row.curve[-1].judged for row in record.rows if row.kind == "ddp" and row.curve), None)
    rows = tuple(_demo_row(row, spec, bench, target) for row in record.rows if row.kind != "compute")
    return DemoResult(bench, target, rows, curves)


def _demo_row(row: RowRecord, spec: BenchSpec, bench: BenchResult, target: float | None) -> DemoRow:
    step = statistics.median(row.step_seconds) if row.step_seconds else 0.0
    steps = seconds = None
    if target is not None and not row.error:
        steps = reached(((float(p.step), p.judged) for p in row.curve), target)
        seconds = seconds_to(row.curve, target)
    predicted = None
    if not bench.emulated and spec.link_bits and row.wire_bytes is not None:
        predicted = max(bench.compute_seconds, bench.forward_seconds + row.wire_bytes * 8 / spec.link_bits)
        seconds = None if steps is None else steps * predicted
    return DemoRow(row.label, step, row.wire_bytes, row.wire_source, steps, seconds, predicted, row.error)


def headline(result: DemoResult) -> str:
    ddp, first, times = result.row("ddp"), result.first, result.times_sooner
    if ddp is None or result.target is None or ddp.seconds is None:
        return ""
    if first is None or first.seconds is None or times is None:
        return f"No row reached DDP's loss ({result.target:.3f}) in the {ddp.seconds:.1f} s that DDP took."
    computed = ", computed for this link, not measured" if first.predicted_seconds else ""
    if not result.ahead:
        return f"The same loss ({result.target:.3f}) took {first.seconds:.1f} s, and DDP {ddp.seconds:.1f} s{computed}."
    pair = f"{first.seconds:.1f} s instead of {ddp.seconds:.1f} s"
    return f"The same loss ({result.target:.3f}) in {pair}: {times:.1f} times faster{computed}."


def advice(result: DemoResult) -> str:
    """Return the line to add to a script if thinwire won in the table's figures, or why there is none."""
    first = result.first
    if result.target is None or not any(row.label != "ddp" and not row.error for row in result.rows):
        return ""
    if first is None or not result.ahead:
        return (
            "That is no gain over DDP, so there is nothing to change for a network like this one. For yours: thinwire "
            "plan --help"
        )
    row = next(row for row in ROWS if row.label == first.label)
    line = f"In your own script, before the loop:\n\nimport thinwire as tw\n{attach_line(row.kind, row.options)}"
    return f'{line}\n\nIn long runs "local" usually gains more. For your model and network: thinwire plan --help'
