"""The demonstration: the same model, text and weights with DDP and with local steps, each until DDP's final loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from thinwire.tools.bench.rows import Row
from thinwire.tools.bench.session import BenchSpec, Point, RowRecord, RunRecord, reached, seconds_to
from thinwire.tools.bench.summary import BenchResult, summarise
from thinwire.tools.bench.words import attach_line

ROWS = (Row("ddp", "ddp"), Row("thinwire local", "local"))
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


def conclusion(result: DemoResult) -> list[str]:
    """Return who was first, and the line to add to a script if thinwire won, or why there is none; [] if DDP failed."""
    ddp, ours = (next((row for row in result.rows if (row.label == "ddp") is theirs), None) for theirs in (True, False))
    if result.target is None or ddp is None or ddp.seconds is None:
        return []
    if ours is None or ours.seconds is None:
        said, won = f"No row reached DDP's loss ({result.target:.3f}) in the {ddp.seconds:.1f} s that DDP took.", False
    else:
        won, loss = ours.seconds <= _LEAD * ddp.seconds, f"The same loss ({result.target:.3f})"
        computed = ", computed for this link, not measured" if ours.predicted_seconds else ""
        said = f"{loss} took {ours.seconds:.1f} s, and DDP {ddp.seconds:.1f} s{computed}."
        if won:
            times = f"{ddp.seconds / ours.seconds:.1f} times faster{computed}"
            said = f"{loss} in {ours.seconds:.1f} s instead of {ddp.seconds:.1f} s: {times}."
    if ours is None or ours.error:
        return [said]
    if not won:
        why = "That is no gain over DDP, so there is nothing to change for a network like this one."
        return [said, f"{why} For yours: thinwire plan --help"]
    lines = f"import thinwire as tw\n{attach_line(ROWS[1].kind, ROWS[1].options)}"
    more = "In long runs take about the square root of the number of workers times DDP's learning rate."
    more += "\nFor your model and network: thinwire plan --help"
    return [said, f"In your own script, before the loop:\n\n{lines}\n\n{more}"]
