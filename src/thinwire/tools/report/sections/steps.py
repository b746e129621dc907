"""One step as a timeline, predicted above measured on the same lanes, and its bytes per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.core.words import duration, volume
from thinwire.predict.timeline import LANES, Event
from thinwire.predict.timeline.result import EXCHANGE_CPU
from thinwire.tools.pictures.colours import Colours, ink, shade
from thinwire.tools.pictures.picture import plotly
from thinwire.tools.report.figures import Block, Chart, Section, hover, names_axis, new, scale, short, stacked
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.traces import StepTrace

_TIMELINE = (
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


def timeline_section(inputs: Inputs, colours: Colours) -> Section | None:
    traces = [trace for trace in inputs.traces if trace.events]
    if not traces:
        return None
    lines = tuple(_timeline_line(trace) for trace in traces)
    return Section(
        "timeline", "One step, as a timeline", _TIMELINE, (Block("", lines, (Chart(_timeline_figure(traces)),)),)
    )


def title(trace: StepTrace) -> str:
    return f"{trace.label} ({trace.name})"


def _timeline_line(trace: StepTrace) -> str:
    said = f"{title(trace)}: {duration(trace.step_seconds)}"
    if trace.exposed is not None:
        said += f", exposed communication {duration(trace.exposed)}"
    sent = sum(trace.bytes_by_bucket.values())
    if sent:
        said += f", {volume(sent)} sent"
    said += f"; one of {trace.steps} steps in the file" if trace.steps > 1 else ""
    said += "" if trace.rank is None else f"; rank {trace.rank}"
    return said + (f"; the first of {trace.ranks} processes in the file." if trace.ranks > 1 else ".")


def _timeline_figure(traces: Sequence[StepTrace]) -> Any:
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
    figure.update_layout(legend={"y": 0, "yref": "container", "yanchor": "bottom"})
    shown: set[str] = set()
    for row, trace in enumerate(traces, start=1):
        bars = [bar for bar in trace.bars if bar.lane in lanes]
        for kind in _KINDS:
            mine = [bar for bar in bars if _kind(bar) == kind]
            if mine:
                figure.add_trace(_bars(mine, kind, unit, kind not in shown), row=row, col=1)
                shown.add(kind)
    names_axis(figure, lanes, [short(lane, 24) for lane in lanes], 0.5)
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
        f"{volume(event.bytes)} sent" if event.bytes else "",
        f"starts at {duration(event.start_seconds)}, lasts {duration(event.duration_seconds)}",
    )


_BUCKETS = (
    "What this rank sent for each bucket of gradients in the step above. Bucket 0 is filled first, by the last layers "
    "of the model. Many small buckets cost start-ups; a few large ones cannot be hidden behind the computation."
)


def buckets_section(inputs: Inputs, colours: Colours) -> Section | None:
    traces = [trace for trace in inputs.traces if trace.bytes_by_bucket]
    if not traces:
        return None
    chart = Chart(_bucket_bars(traces))
    return Section("buckets", "Bytes per bucket", _BUCKETS, (Block("", tuple(map(_bucket_line, traces)), (chart,)),))


def _bucket_line(trace: StepTrace) -> str:
    sent = trace.bytes_by_bucket
    total, largest = sum(sent.values()), max(sent, key=sent.__getitem__)
    return (
        f"{title(trace)}: {len(sent)} bucket{'s' if len(sent) > 1 else ''}, {volume(total)}; the largest is bucket "
        f"{largest} with {volume(sent[largest])}."
    )


_TINTS = (("#8cc1d6", "#d9c29b", "#b0bac5"), ("#1d4f68", "#6f5731", "#3e4c59"))  # predicted, measured


def _bucket_bars(traces: Sequence[StepTrace]) -> Any:
    go = plotly()
    numbers = sorted({bucket for trace in traces for bucket in trace.bytes_by_bucket})
    figure = new(340, barmode="group", bargap=0.25)
    count = {True: 0, False: 0}
    for trace in traces:
        tints = _TINTS[0] if trace.predicted else _TINTS[1]
        tint = tints[count[trace.predicted] % len(tints)]
        count[trace.predicted] += 1
        sent = trace.bytes_by_bucket
        figure.add_trace(
            go.Bar(
                name=short(title(trace), 60),
                x=[str(bucket) for bucket in numbers],
                y=[sent.get(bucket, 0) / 1e6 for bucket in numbers],
                marker={"color": tint},
                hoverinfo="text",
                hovertext=[hover(title(trace), f"bucket {b}: {volume(sent.get(b, 0))} sent") for b in numbers],
                showlegend=True,
            )
        )
    figure.update_xaxes(
        type="category", title_text="bucket number, in the order of the plan", fixedrange=True, showgrid=False
    )
    return figure.update_yaxes(title_text="sent (MB)", rangemode="tozero", fixedrange=True)
