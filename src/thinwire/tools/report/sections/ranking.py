"""The ranking: bars of the predicted step, exact and lossy methods separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.draw import plotly
from thinwire.tools.report.figures import BAR, TEXT, hatched, names_axis, scale, stacked
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.predictions import MethodRanking, RankedMethod
from thinwire.tools.report.section import Block, Chart, Section
from thinwire.tools.report.words import duration, hover, megabytes, short

_READING = (
    "Each bar is the predicted time of one training step; shorter is better. The hatched end is exposed "
    "communication: time in which the network works and nothing is computed. The thin line is the band in which the "
    "step should lie. Next to it is what bounds the step, that is, what to improve next. Exact methods change "
    "nothing in the result; lossy ones send less and need more steps to the same loss: how many, where that was "
    "measured, is shown after the bar."
)


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None without a ranking."""
    rankings = [ranking for ranking in inputs.rankings if ranking.entries]
    if not rankings:
        return None
    return Section("ranking", "Predicted ranking", _READING, tuple(_block(ranking, colours) for ranking in rankings))


def _block(ranking: MethodRanking, colours: Colours) -> Block:
    lines = tuple(filter(None, (ranking.sentence, ranking.facts)))
    notes = tuple(f"Left out: {sentence}" for sentence in ranking.left_out)
    return Block(ranking.name, lines, (Chart(_figure(ranking.entries, colours)),), notes=notes)


def _figure(entries: Sequence[RankedMethod], colours: Colours) -> Any:
    groups = [("exact", [e for e in entries if e.exact]), ("lossy", [e for e in entries if not e.exact])]
    groups = [(title, sorted(group, key=lambda e: e.step_seconds)) for title, group in groups if group]
    longest = max(max(e.high_seconds, e.step_seconds) for e in entries)
    unit, unit_name = scale(longest)
    bars = [len(group) for _, group in groups]
    height = 90 + BAR * sum(bars) + 36 * len(groups)
    gap = 46 / height if len(groups) > 1 else 0.0
    figure = stacked([title for title, _ in groups], bars, gap, height, barmode="stack", showlegend=False)
    figure.update_layout(margin={"t": 30})
    for row, (_, group) in enumerate(groups, start=1):
        _bars(figure, row, group, colours, unit)
    figure.update_xaxes(range=[0, longest * unit * 1.6], fixedrange=True)
    figure.update_xaxes(title_text=f"predicted step ({unit_name})", row=len(groups), col=1)
    return figure


def _bars(figure: Any, row: int, group: Sequence[RankedMethod], colours: Colours, unit: float) -> None:
    go = plotly()
    keys = [f"{number} {entry.label}" for number, entry in enumerate(group)]  # labels may be equal
    tints = [colours.of(entry.label) for entry in group]
    exposed = [min(max(e.exposed_seconds, 0.0), e.step_seconds) for e in group]
    common = {
        "y": keys,
        "orientation": "h",
        "width": 0.62,
        "hoverinfo": "text",
        "hovertext": [_hover(e) for e in group],
    }
    hidden = [(e.step_seconds - x) * unit for e, x in zip(group, exposed)]
    figure.add_trace(go.Bar(x=hidden, marker_color=tints, **common), row=row, col=1)
    figure.add_trace(go.Bar(x=[x * unit for x in exposed], marker=hatched(tints), **common), row=row, col=1)
    band = {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, e.high_seconds - e.step_seconds) * unit for e in group],
        "arrayminus": [max(0.0, e.step_seconds - e.low_seconds) * unit for e in group],
        "color": TEXT,
        "thickness": 1.5,
        "width": 5,
    }
    ends = {"x": [e.step_seconds * unit for e in group], "y": keys, "mode": "markers", "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(error_x=band, marker={"size": 1, "color": TEXT}, **ends), row=row, col=1)
    figure.add_trace(
        go.Scatter(
            x=[max(e.high_seconds, e.step_seconds) * unit for e in group],
            y=keys,
            mode="text",
            text=["  " + short(", ".join(filter(None, (_told(e), e.bound_by)))) for e in group],
            textposition="middle right",
            hoverinfo="skip",
            cliponaxis=False,
        ),
        row=row,
        col=1,
    )
    names_axis(figure, keys, [short(e.label) for e in group], row)


def _told(entry: RankedMethod) -> str:
    return duration(entry.step_seconds) + ("" if entry.exact or entry.steps is None else f" x {entry.steps:.2f} steps")


def _hover(entry: RankedMethod) -> str:
    sent = "" if entry.bytes_sent is None else f"{megabytes(entry.bytes_sent)} sent by a rank in a step"
    return hover(
        entry.label,
        f"step {duration(entry.step_seconds)} ({duration(entry.low_seconds)} to {duration(entry.high_seconds)})",
        f"exposed communication {duration(entry.exposed_seconds)}",
        sent,
        "" if entry.steps is None else f"{entry.steps:.2f} steps to a loss for each step of exact averaging",
        f"bound by {entry.bound_by}" if entry.bound_by else "",
    )
