"""One step as a timeline: predicted above measured, on the same lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.predict.timeline import LANES, Event
from thinwire.predict.timeline.result import EXCHANGE_CPU
from thinwire.tools.pictures.colours import Colours, ink, shade
from thinwire.tools.pictures.draw import plotly
from thinwire.tools.report.figures import scale, stacked
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.section import Block, Chart, Section
from thinwire.tools.report.traces import StepTrace
from thinwire.tools.report.words import duration, hover, megabytes, short

_READING = (
    "Time runs to the right; each line is something that works independently: the computation, the methods' own work "
    "on the gradients, the links. A bar is one bucket of gradients (its number is shown where there is room; "
    "neighbours differ in shade). Links that work while the computation line is empty are exposed communication. Drag "
    "over a part to enlarge it, double-click to go back, point at a bar for its figures."
)
_KINDS = {
    "forward": "#b0bac5",
    "backward": "#7b8794",
    "optimizer": "#3e4c59",
    "other compute": "#cbd2d9",
    "method": "#b08d57",
    "exchange": "#2f80a8",
    EXCHANGE_CPU: "#8cc1d6",
}
_LANE = 40  # pixels
_MOST_LANES = 10


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None without a timeline."""
    traces = [trace for trace in inputs.traces if trace.events]
    if not traces:
        return None
    lines = tuple(_line(trace) for trace in traces)
    return Section("timeline", "One step, as a timeline", _READING, (Block("", lines, (Chart(_figure(traces)),)),))


def title(trace: StepTrace) -> str:
    """Return the title of a trace."""
    return f"{trace.label} ({trace.name})"


def _line(trace: StepTrace) -> str:
    said = f"{title(trace)}: {duration(trace.step_seconds)}"
    if trace.exposed is not None:
        said += f", exposed communication {duration(trace.exposed)}"
    sent = sum(trace.bytes_by_bucket.values())
    if sent:
        said += f", {megabytes(sent)} sent"
    said += f"; one of {trace.steps} steps in the file" if trace.steps > 1 else ""
    said += "" if trace.rank is None else f"; rank {trace.rank}"
    return said + (f"; the first of {trace.ranks} processes in the file." if trace.ranks > 1 else ".")


def _figure(traces: Sequence[StepTrace]) -> Any:
    lanes = _lanes(traces)
    longest = max(trace.step_seconds for trace in traces)
    unit, unit_name = scale(longest)
    panel = _LANE * len(lanes)
    height = 110 + len(traces) * (panel + 40)
    figure = stacked(
        [short(title(trace), 90) for trace in traces],
        [1.0] * len(traces),
        42 / (height - 110) if len(traces) > 1 else 0.0,
        height,
        barmode="overlay",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 10},
    )
    # The first title is where the legend would begin, so the legend goes below.
    figure.update_layout(margin={"t": 30}, legend={"y": 0, "yref": "container", "yanchor": "bottom"})
    shown: set[str] = set()
    for row, trace in enumerate(traces, start=1):
        bars = [bar for bar in trace.bars if bar.lane in lanes]
        for kind in _KINDS:
            mine = [bar for bar in bars if _kind(bar) == kind]
            if mine:
                figure.add_trace(_bars(mine, kind, unit, kind not in shown), row=row, col=1)
                shown.add(kind)
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(reversed(lanes)),
        tickvals=list(lanes),
        ticktext=[short(lane, 24) for lane in lanes],
        range=[-0.5, len(lanes) - 0.5],
        fixedrange=True,
        ticks="",
        ticklabelstandoff=6,
        showgrid=False,
    )
    figure.update_xaxes(range=[0, longest * unit * 1.01])
    figure.update_xaxes(title_text=f"time from the start of the step ({unit_name})", row=len(traces), col=1)
    return figure


def _bars(bars: Sequence[Event], kind: str, unit: float, legend: bool) -> Any:
    base = _KINDS[kind]
    tints = [shade(base, 0.28) if bar.bucket is not None and bar.bucket % 2 else base for bar in bars]
    return plotly().Bar(
        x=[bar.duration_seconds * unit for bar in bars],
        base=[bar.start_seconds * unit for bar in bars],
        y=[bar.lane for bar in bars],
        orientation="h",
        width=0.74,
        name=kind,
        legendgroup=kind,
        showlegend=legend,
        marker={"color": tints, "line": {"width": 0}},
        text=["" if bar.bucket is None else str(bar.bucket) for bar in bars],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 11, "color": [ink(tint) for tint in tints]},
        hoverinfo="text",
        hovertext=[_hover(bar) for bar in bars],
    )


def _lanes(traces: Sequence[StepTrace]) -> list[str]:
    """Return the lanes on which anything happens: thinwire's own, then the busiest others."""
    busy: dict[str, float] = {}
    for trace in traces:
        for event in trace.events:
            busy[event.lane] = busy.get(event.lane, 0.0) + event.duration_seconds
    ours = [lane for lane in LANES if lane in busy]
    others = sorted((lane for lane in busy if lane not in LANES), key=lambda lane: -busy[lane])
    return [*ours, *others[: _MOST_LANES - len(ours)]]


def _kind(event: Event) -> str:
    if event.name == EXCHANGE_CPU:
        return EXCHANGE_CPU
    if event.lane.startswith("link"):
        return "exchange"
    if event.lane == "method":
        return "method"
    first = event.name.split(" ")[0].lower()
    return first if first in _KINDS else "other compute"


def _hover(event: Event) -> str:
    bucket = "" if event.bucket is None else f", bucket {event.bucket}"
    return hover(
        f"{event.name}{bucket}",
        f"{megabytes(event.bytes)} sent" if event.bytes else "",
        f"starts at {duration(event.start_seconds)}, lasts {duration(event.duration_seconds)}",
    )
