"""What all sections share: their parts, one plain layout of plotly's figures, and texts made safe for them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.pictures.picture import plotly

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
TEXT, LINE, FAINT = "#1f2933", "#52606d", "#e4e7eb"
BAR = 34
"""Pixels of height for one horizontal bar."""


@dataclass(frozen=True)
class Chart:
    """A picture.

    Attributes:
        figure: plotly's figure.
        caption: shown above it.
        share: share of the width, next to others of one block.
    """

    figure: Any
    caption: str = ""
    share: int = 1


@dataclass(frozen=True)
class Block:
    """Everything that belongs to one result.

    Attributes:
        legend: of lines and marks in the charts: their look (a class of page.css, or a colour) and their meaning.
    """

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
    """Return an empty figure."""
    return dress(plotly().Figure(), height, **layout)


def stacked(titles: Sequence[str], heights: Sequence[float], gap: float, height: int, **layout: Any) -> Any:
    """Return panels one above the other over one horizontal axis, with their titles on the left."""
    plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=gap,
        row_heights=list(heights),
        subplot_titles=list(titles),
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13, "color": LINE})
    return dress(figure, height, **layout)


def dress(figure: Any, height: int, **layout: Any) -> Any:
    """Apply the common layout."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 16, "t": 10, "b": 10},
        font={"family": FONT, "size": 13, "color": TEXT},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        dragmode=False,
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": LINE, "align": "left", "font": {"family": FONT, "size": 13}},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "xanchor": "left", "font": {"size": 13}},
    )
    axis = {
        "automargin": True,
        "gridcolor": FAINT,
        "zeroline": False,
        "linecolor": LINE,
        "title": {"standoff": 12, "font": {"size": 13}},
    }
    figure.update_xaxes(ticks="outside", tickcolor=LINE, showline=True, **axis)
    figure.update_yaxes(**axis)
    return figure.update_layout(**layout)


def names_axis(figure: Any, labels: Sequence[str], shown: Sequence[str], row: int | None = None) -> None:
    """Set up the vertical axis of horizontal bars: names from the top, long ones cut."""
    place = {} if row is None else {"row": row, "col": 1}
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(reversed(labels)),
        tickvals=list(labels),
        ticktext=list(shown),
        range=[-0.6, len(labels) - 0.4],
        showgrid=False,
        ticks="",
        ticklabelstandoff=6,
        fixedrange=True,
        **place,
    )


def hatched(tints: Sequence[str]) -> dict[str, Any]:
    """Return markers for the parts of bars that are exposed communication."""
    lines = {"color": list(tints), "width": 1}
    return {"color": list(tints), "line": lines, "pattern": {"shape": "/", "size": 7, "solidity": 0.3}}


def scale(longest_seconds: float) -> tuple[float, str]:
    """Return the unit of a time axis: factor from seconds, and name."""
    return (1.0, "s") if longest_seconds >= 1 else (1e3, "ms")


def plain(text: str) -> str:
    """Escape for plotly, which interprets tags in every text."""
    return html.escape(" ".join(text.split()), quote=False)


def short(text: str, length: int = 34) -> str:
    """Do the same and cut long texts."""
    return plain(text if len(text) <= length else text[: length - 1] + "…")


def hover(*lines: str, width: int = 70) -> str:
    """Return the lines of a hover label, the first in bold, long ones wrapped."""
    wrapped: list[str] = []
    for line in filter(None, lines):
        row = ""
        for word in line.split():
            if row and len(row) + len(word) >= width:
                wrapped.append(row)
                row = word
            else:
                row = f"{row} {word}".strip()
        wrapped.append(row)
    first, *rest = [html.escape(line, quote=False) for line in wrapped] or [""]
    return "<br>".join([f"<b>{first}</b>", *rest])
