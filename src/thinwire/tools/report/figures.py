"""What all sections share: their parts, one plain layout of plotly's figures, and texts made safe for them."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.picture import Picture, as_plotly, plotly

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
TEXT, LINE, FAINT = "#1f2933", "#52606d", "#e4e7eb"
BAR = 34
"""Pixels of height for one horizontal bar."""


@dataclass(frozen=True)
class Chart:
    """A figure of plotly's, its caption, and its share of the width next to others of one block."""

    figure: Any
    caption: str = ""
    share: int = 1


@dataclass(frozen=True)
class Block:
    """What belongs to one result, in plain texts; ``legend``: (look: a class of page.css or a colour, meaning)."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One question, how to read the answer, and the answers."""

    anchor: str
    title: str
    reading: str
    blocks: tuple[Block, ...]


def new(height: int, **layout: Any) -> Any:
    return dress(plotly().Figure(), height, **layout)


def stacked(titles: Sequence[str], heights: Sequence[float], gap: float, height: int, **layout: Any) -> Any:
    """Return panels one above the other over one horizontal axis, with their titles on the left."""
    plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=gap,
                           row_heights=list(heights), subplot_titles=list(titles))  # fmt: skip
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": LINE})
    return dress(figure, height, **layout).update_layout(margin={"t": 30})


def dress(figure: Any, height: int, **layout: Any) -> Any:
    font = {"family": FONT, "size": 13}
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 16, "t": 10, "b": 10},
        font={**font, "color": TEXT},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        dragmode=False,
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": LINE, "align": "left", "font": font},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "xanchor": "left", "font": {"size": 13}},
    )
    title = {"standoff": 12, "font": {"size": 13}}
    axis = {"automargin": True, "gridcolor": FAINT, "zeroline": False, "linecolor": LINE, "title": title}
    figure.update_xaxes(ticks="outside", tickcolor=LINE, showline=True, **axis)
    figure.update_yaxes(**axis)
    return figure.update_layout(**layout)


def drawn(picture: Picture, colours: Colours) -> Any:
    """Return a picture as one of the page's figures."""
    figure = as_plotly(picture, colours)
    return dress(figure, figure.layout.height)


def names_axis(figure: Any, labels: Sequence[str], shown: Sequence[str], margin: float = 0.6, **place: int) -> None:
    """Set up the vertical axis of horizontal bars: names from the top, long ones cut."""
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(reversed(labels)),
        tickvals=list(labels),
        ticktext=list(shown),
        range=[-margin, len(labels) - 1 + margin],
        showgrid=False,
        ticks="",
        ticklabelstandoff=6,
        fixedrange=True,
        **place,
    )


@dataclass(frozen=True)
class StepBar:
    """A step of one method: its seconds, those of exposed communication, and the band around them."""

    label: str
    tint: str
    seconds: float
    exposed: float
    low: float
    high: float
    hover: str


def step_bars(figure: Any, bars: Sequence[StepBar], unit: float, length: int, **place: int) -> list[str]:
    """Draw steps as bars whose hatched end is exposed communication, with their bands. Return their places."""
    go = plotly()
    keys = [f"{number} {bar.label}" for number, bar in enumerate(bars)]  # labels may be equal
    tints = [bar.tint for bar in bars]
    exposed = [min(max(bar.exposed, 0.0), bar.seconds) for bar in bars]
    common = {"y": keys, "orientation": "h", "width": 0.62, "hoverinfo": "text", "hovertext": [b.hover for b in bars]}
    hidden = [(bar.seconds - x) * unit for bar, x in zip(bars, exposed)]
    look = {"shape": "/", "size": 7, "solidity": 0.3}
    hatched = {"color": tints, "line": {"color": tints, "width": 1}, "pattern": look}
    figure.add_trace(go.Bar(x=hidden, marker_color=tints, **common), **place)
    figure.add_trace(go.Bar(x=[x * unit for x in exposed], marker=hatched, **common), **place)
    band = {"type": "data", "symmetric": False, "color": TEXT, "thickness": 1.5, "width": 5}
    band["array"] = [max(0.0, bar.high - bar.seconds) * unit for bar in bars]
    band["arrayminus"] = [max(0.0, bar.seconds - bar.low) * unit for bar in bars]
    points(figure, [bar.seconds * unit for bar in bars], keys, {"size": 1, "color": TEXT}, error_x=band, **place)
    names_axis(figure, keys, [short(bar.label, length) for bar in bars], **place)
    return keys


def points(figure: Any, x: Sequence[Any], y: Sequence[str], marker: dict[str, Any], error_x: Any = None,
           **place: int) -> None:  # fmt: skip
    trace = plotly().Scatter(x=x, y=y, mode="markers", marker=marker, error_x=error_x, hoverinfo="skip")
    figure.add_trace(trace, **place)


def scale(longest_seconds: float) -> tuple[float, str]:
    """Return the unit of a time axis: factor from seconds, and name."""
    return (1.0, "s") if longest_seconds >= 1 else (1e3, "ms")


def plain(text: str) -> str:
    """Escape for plotly, which interprets tags in every text."""
    return html.escape(" ".join(text.split()), quote=False)


def short(text: str, length: int = 34) -> str:
    """Escape for plotly, and cut long texts."""
    return plain(text if len(text) <= length else text[: length - 1] + "…")


def hover(*lines: str, width: int = 70) -> str:
    """Return the lines of a hover label, the first in bold, long ones wrapped."""
    wrapped = [row for line in lines for row in textwrap.wrap(line, width, break_long_words=False)]
    first, *rest = [html.escape(line, quote=False) for line in wrapped] or [""]
    return "<br>".join([f"<b>{first}</b>", *rest])
