"""Bytes per bucket, from the timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.draw import plotly
from thinwire.tools.report.figures import new
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.section import Block, Chart, Section
from thinwire.tools.report.sections.timeline import title
from thinwire.tools.report.traces import StepTrace
from thinwire.tools.report.words import hover, megabytes, short

_READING = (
    "What this rank sent for each bucket of gradients in the step above. Bucket 0 is filled first, by the last layers "
    "of the model. Many small buckets cost start-ups; a few large ones cannot be hidden behind the computation."
)


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None without a timeline that contains bytes."""
    traces = [trace for trace in inputs.traces if trace.bytes_by_bucket]
    if not traces:
        return None
    chart = Chart(_figure(traces))
    return Section("buckets", "Bytes per bucket", _READING, (Block("", tuple(map(_line, traces)), (chart,)),))


def _line(trace: StepTrace) -> str:
    sent = trace.bytes_by_bucket
    total, largest = sum(sent.values()), max(sent, key=sent.__getitem__)
    return (
        f"{title(trace)}: {len(sent)} bucket{'s' if len(sent) > 1 else ''}, {megabytes(total)}; the largest is bucket "
        f"{largest} with {megabytes(sent[largest])}."
    )


_TINTS = (("#8cc1d6", "#d9c29b", "#b0bac5"), ("#1d4f68", "#6f5731", "#3e4c59"))  # predicted, measured


def _figure(traces: Sequence[StepTrace]) -> Any:
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
                hovertext=[hover(title(trace), f"bucket {b}: {megabytes(sent.get(b, 0))} sent") for b in numbers],
                showlegend=True,
            )
        )
    figure.update_xaxes(
        type="category", title_text="bucket number, in the order of the plan", fixedrange=True, showgrid=False
    )
    return figure.update_yaxes(title_text="sent (MB)", rangemode="tozero", fixedrange=True)
