"""What was measured: step times with their spread, bytes, the figures as a table; losses; runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.core.words import duration, factor, volume
from thinwire.tools.bench.summary import BenchResult, RowSummary, loss_picture
from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.picture import plotly
from thinwire.tools.report.figures import (
    BAR,
    TEXT,
    Block,
    Chart,
    Section,
    StepBar,
    drawn,
    hover,
    names_axis,
    new,
    points,
    scale,
    short,
    step_bars,
)
from thinwire.tools.report.inputs import Bench, Inputs
from thinwire.tools.report.runs import RunPicture, grouped

_BENCH = (
    "Each bar is the median time of one training step of the slowest worker; shorter is better. The hatched end is "
    "exposed communication: what the step takes beyond computing alone. The thin line is the spread (half of the "
    "steps lie within it). The dotted line is computing alone. The dashed line is the floor: no exact method whose "
    "average is ready at the end of backward can be faster on this link; a compressed one can."
)
_SOURCES = {
    "interface": "MB per step: what a machine's interface sent, headers included.",
    "stats": "MB per step of thinwire's methods: its own count, per rank.",
    "formula": "MB per step of the others: the ring formula, per rank, not measured.",
}
_EDGES = 70  # pixels of height for the axis


def bench_section(inputs: Inputs, colours: Colours) -> Section | None:
    blocks = tuple(_bench_block(bench, colours) for bench in inputs.of(Bench))
    return Section("bench", "Measured steps", _BENCH, blocks) if blocks else None


def _bench_block(bench: Bench, colours: Colours) -> Block:
    found = bench.found
    rows = [row for row in found.rows if row.step_seconds is not None and not row.error]
    lines = [f"{bench.where[0].upper()}{bench.where[1:]}."]
    charts: list[Chart] = []
    if rows:
        best = min(rows, key=lambda row: row.step_seconds or 0.0)
        gain = f", {factor(best.speedup)} as fast as ddp" if best.speedup and best.label != "ddp" else ""
        lines.append(f"Shortest step: {best.label}, {duration(best.step_seconds or 0.0)}{gain}.")
        charts.append(Chart(_step_bars(found, rows, colours), "Time of a step", share=3))
        if any(row.bytes_per_step is not None for row in rows):
            charts.append(Chart(_byte_bars(rows, colours), "Sent per step", share=2))
    notes = [text for source, text in _SOURCES.items() if any(row.bytes_source == source for row in rows)]
    notes += [f"{row.label} failed: {row.error}" for row in found.rows if row.error]
    if any(row.predicted_seconds is not None for row in rows):
        notes.append(
            f"Predicted at {found.link}: computed, not measured: max(compute, forward + bytes / rate), a lower bound."
        )
    if found.note:
        notes.append(f"Where: {found.note}.")
    legend = _legend(found, rows) if rows else ()
    return Block(bench.name, tuple(lines), tuple(charts), legend, _table(found, rows) if rows else (), tuple(notes))


def _guides(bench: BenchResult, rows: Sequence[RowSummary]) -> list[tuple[str, str, float]]:
    """Return the vertical lines: their look, their meaning, their position."""
    guides = [("dotted", "compute alone", bench.compute_seconds)]
    if bench.link and (bench.emulated or any(row.predicted_seconds is not None for row in rows)):
        guides.append(("dashed", f"floor of exact methods at {bench.link}", bench.floor_seconds))
    return guides


def _legend(bench: BenchResult, rows: Sequence[RowSummary]) -> tuple[tuple[str, str], ...]:
    marks = [("hatched", "exposed communication")]
    marks += [(look, f"{meaning}: {duration(value)}") for look, meaning, value in _guides(bench, rows)]
    if any(row.predicted_seconds is not None for row in rows):
        marks.append(("diamond", f"predicted at {bench.link}, a lower bound"))
    return tuple(marks)


def _step_bars(bench: BenchResult, rows: Sequence[RowSummary], colours: Colours) -> Any:
    predicted, guides = [row.predicted_seconds for row in rows], _guides(bench, rows)
    bars = []
    for row in rows:
        step, half = row.step_seconds or 0.0, (row.spread_seconds or 0.0) / 2
        ends = (step - half, step + half)
        bars.append(StepBar(row.label, colours.of(row.label), step, row.exposed_seconds or 0.0, *ends, _row_hover(row)))
    longest = max([bar.high for bar in bars] + [value or 0.0 for value in predicted] + [value for *_, value in guides])
    unit, unit_name = scale(longest)
    figure = new(_EDGES + BAR * len(rows), barmode="stack", showlegend=False)
    keys = step_bars(figure, bars, unit, 26)
    diamond = {"symbol": "diamond-open", "size": 11, "color": TEXT, "line": {"width": 2}}
    points(figure, [None if value is None else value * unit for value in predicted], keys, diamond)
    for look, _, value in guides:
        line = {"dash": {"dotted": "dot", "dashed": "dash"}[look], "color": TEXT, "width": 2}
        figure.add_shape(type="line", x0=value * unit, x1=value * unit, y0=0, y1=1, yref="paper", line=line)
    return figure.update_xaxes(title_text=f"step ({unit_name})", range=[0, longest * unit * 1.06], fixedrange=True)


def _byte_bars(rows: Sequence[RowSummary], colours: Colours) -> Any:
    keys = [f"{number} {row.label}" for number, row in enumerate(rows)]
    figure = new(_EDGES + BAR * len(rows), showlegend=False)
    sent = [(row.bytes_per_step or 0.0) / 1e6 for row in rows]
    figure.add_trace(
        plotly().Bar(
            x=sent,
            y=keys,
            orientation="h",
            width=0.62,
            marker_color=[colours.of(row.label) for row in rows],
            text=[volume(row.bytes_per_step) for row in rows],
            textposition="outside",
            cliponaxis=False,
            hoverinfo="text",
            hovertext=[_row_hover(row) for row in rows],
        )
    )
    names_axis(figure, keys, [short(row.label, 26) for row in rows])
    return figure.update_xaxes(title_text="sent per step (MB)", range=[0, (max(sent) or 1.0) * 1.45], fixedrange=True)


def _table(bench: BenchResult, rows: Sequence[RowSummary]) -> tuple[tuple[str, ...], ...]:
    predicted = any(row.predicted_seconds is not None for row in rows)
    head = ["method", "step", "spread", "exposed", "sent", "loss", "worth"]
    lines = [tuple(head + ([f"predicted at {bench.link}"] if predicted else []))]
    for row in rows:
        cells = [row.label, *(map(duration, (row.step_seconds, row.spread_seconds, row.exposed_seconds)))]
        cells += [volume(row.bytes_per_step), _decimal(row.loss), _decimal(row.worth)]
        lines.append(tuple(cells + ([duration(row.predicted_seconds)] if predicted else [])))
    return tuple(lines)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _row_hover(row: RowSummary) -> str:
    return hover(
        row.label,
        f"step {duration(row.step_seconds)}, spread {duration(row.spread_seconds)}",
        f"exposed communication {duration(row.exposed_seconds)}",
        f"{volume(row.bytes_per_step)} sent per step" if row.bytes_per_step is not None else "",
    )


_LOSS = (
    "The same model from the same weights on the same data, once per method; lower is better. Against seconds: what a "
    "user gets; a method with shorter steps gets further in the same time. Against steps: what compression costs; "
    "exact methods lie on one line, lossy ones may lie a little above it."
)


def loss_section(inputs: Inputs, colours: Colours) -> Section | None:
    benches = [bench for bench in inputs.of(Bench) if bench.curves]
    if not benches:
        return None
    return Section("loss", "Loss while training", _LOSS, tuple(_loss_block(bench, colours) for bench in benches))


def _loss_block(bench: Bench, colours: Colours) -> Block:
    lasts = {label: points[-1] for label, points in bench.curves.items()}
    ends = ", ".join(f"{n} {p.judged:.3f} after {p.step} steps and {duration(p.seconds)}" for n, p in lasts.items())
    charts = tuple(
        Chart(drawn(loss_picture(bench.curves, bench.name, against=axis), colours), f"Against {axis}")
        for axis in ("seconds", "steps")
    )
    lines = (
        f"{bench.where[0].upper()}{bench.where[1:]}.",
        *(f"{said}." for said in bench.answer),
        f"At the end: {ends}.",
    )
    return Block(bench.name, lines, charts)


_RUNS = (
    "What a run recorded about itself. Each name has the same colour on the whole page. Dashed lines are values to "
    "compare with; dotted ones mark what happened at that moment."
)


def runs_section(inputs: Inputs, colours: Colours) -> Section | None:
    blocks = []
    for picture in grouped(inputs.of(RunPicture)):
        blocks.append(Block(picture.title, charts=(Chart(drawn(picture, colours)),)))
    return Section("runs", "Runs", _RUNS, tuple(blocks)) if blocks else None
