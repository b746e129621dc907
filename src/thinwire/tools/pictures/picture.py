"""A picture as plain data, the ``"picture"`` of a result's JSON: PNG and SVG by matplotlib, HTML by plotly."""

from __future__ import annotations

import html
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.tools.pictures.colours import Colours


@dataclass(frozen=True)
class Series:
    """Points that belong together, in one colour.

    Attributes:
        name: a method, an algorithm, a node; it has one colour in all panels, and in a whole report.
        x, y: coordinates of its points.
        look: "line", "steps" (each value holds until the next), "points", or "bars" (on those of the line before).
        at: a point that is marked.
        said: text after the name in the legend.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    look: str = "line"
    at: tuple[float, float] | None = None
    said: str = ""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"the line {self.name!r} has {len(self.x)} x values and {len(self.y)} y values")
        if self.look not in LOOKS:
            raise ValueError(f"the line {self.name!r}: look={self.look!r} is not one of {', '.join(LOOKS)}")

    @property
    def label(self) -> str:
        return f"{self.name}: {self.said}" if self.said else self.name


LOOKS = ("line", "steps", "points", "bars")


@dataclass(frozen=True)
class Mark:
    """An event at one place of the x axis."""

    x: float
    text: str


@dataclass(frozen=True)
class Level:
    """A value to compare with: a target, chance, a limit."""

    y: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes.

    Attributes:
        x, y: the names of the axes, with their units.
        lines: what is drawn.
        marks, levels: vertical and horizontal lines with words.
        y_range: from and to; None: as the lines need.
        log_x: a logarithmic x axis.
        x_names: what stands at x = 0, 1, ... in place of numbers.
    """

    x: str
    y: str
    lines: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    levels: tuple[Level, ...] = ()
    y_range: tuple[float, float] | None = None
    log_x: bool = False
    x_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Panels side by side, at most two in a row."""

    title: str
    panels: tuple[Panel, ...]

    def names(self) -> Iterator[str]:
        for panel in self.panels:
            for line in panel.lines:
                yield line.name


_GREY = "#52606d"
_PLOTLY_LOOKS: dict[str, dict[str, Any]] = {
    "line": {"mode": "lines+markers"},
    "steps": {"mode": "lines", "line_shape": "hv"},
    "points": {"mode": "markers"},
}
_PYPLOT_LOOKS: dict[str, dict[str, Any]] = {
    "line": {"marker": "o", "markersize": 3},
    "steps": {"drawstyle": "steps-post"},
    "points": {"marker": "o", "markersize": 4, "linestyle": "none"},
}
_FILES = (".png", ".svg", ".html")


def check_plot(path: Path | None) -> None:
    """Raise ``ValueError`` unless ``--plot`` can be drawn: known file type, library installed."""
    if path is None:
        return
    if path.suffix not in _FILES:
        raise ValueError(f"--plot {path}: the name must end in {', '.join(_FILES[:-1])} or {_FILES[-1]}")
    if path.suffix == ".html":
        plotly()
    else:
        _pyplot()


def write_picture(picture: Picture, path: Path) -> None:
    """Write the picture as ``.png``, ``.svg`` or ``.html``.

    Raises:
        ValueError: another file type, or its library is not installed.
    """
    colours = Colours([picture.names()])
    if path.suffix == ".html":
        as_plotly(picture, colours).update_layout(title=_plain(picture.title)).write_html(path, include_plotlyjs=True)
    else:
        _by_matplotlib(picture, colours, path)


def as_plotly(picture: Picture, colours: Colours) -> Any:
    """Return the figure, without its title. A line's name appears in the legend once, however many panels it is in."""
    go = plotly()
    from plotly.subplots import make_subplots

    across = min(2, len(picture.panels))
    down = -(-len(picture.panels) // across)
    figure = make_subplots(rows=down, cols=across)
    told: set[str] = set()
    for number, panel in enumerate(picture.panels):
        place = {"row": number // across + 1, "col": number % across + 1}
        for line in panel.lines:
            tint = colours.of(line.name)
            common = {"name": _plain(line.label), "legendgroup": line.name, "marker_color": tint}
            shown = line.name not in told
            told.add(line.name)
            draw = go.Bar if line.look == "bars" else partial(go.Scatter, **_PLOTLY_LOOKS[line.look])
            figure.add_trace(draw(x=line.x, y=line.y, showlegend=shown, **common), **place)
            if line.at is not None:
                x, y = line.at
                figure.add_trace(
                    go.Scatter(x=[x], y=[y], mode="markers", marker_size=12, showlegend=False, **common), **place
                )
        for mark in panel.marks:
            figure.add_vline(
                mark.x,
                line_dash="dot",
                line_color=_GREY,
                annotation_text=_plain(mark.text),
                annotation_textangle=-90,
                **place,
            )
        for level in panel.levels:
            figure.add_hline(level.y, line_dash="dash", line_color=_GREY, annotation_text=_plain(level.text), **place)
        figure.update_xaxes(title_text=_plain(panel.x), type="log" if panel.log_x else None, **place)
        if panel.x_names:
            names = list(map(_plain, panel.x_names))
            figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names, **place)
        figure.update_yaxes(title_text=_plain(panel.y), range=panel.y_range, **place)
    return figure.update_layout(height=420 * down, barmode="stack")


def _plain(text: str) -> str:
    """Escape for plotly, which interprets tags in every text."""
    return html.escape(text, quote=False)


def _by_matplotlib(picture: Picture, colours: Colours, path: Path) -> None:
    plt = _pyplot()
    across = min(2, len(picture.panels))
    down = -(-len(picture.panels) // across)
    named = max(len(panel.x_names) for panel in picture.panels)
    size = (max(8, 1.4 * named + 3), 5.4) if across == 1 else (11, 5 * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
    for panel, place in zip(picture.panels, axes.flat):
        _panel(panel, colours, place)
    for place in list(axes.flat)[len(picture.panels) :]:
        place.set_visible(False)
    figure.suptitle(textwrap.fill(picture.title, int(13 * figure.get_figwidth())), fontsize=10)
    figure.tight_layout()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "thinwire"}):  # text as text, the same bytes each time
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(panel: Panel, colours: Colours, axes: Any) -> None:
    below: defaultdict[float, float] = defaultdict(float)
    for index, line in enumerate(panel.lines):
        tint = colours.of(line.name)
        if line.look == "bars":
            axes.bar(line.x, line.y, bottom=[below[x] for x in line.x], label=line.label, color=tint)
            for x, y in zip(line.x, line.y):
                below[x] += y
            continue
        width = 1.3 if index % 2 else 2.6  # of two lines that cover each other, both can be seen
        style = {"color": tint, "linewidth": width, "zorder": 3 - width / 10, **_PYPLOT_LOOKS[line.look]}
        axes.plot(line.x, line.y, label=line.label, **style)
        if line.at is not None:
            axes.plot(*([value] for value in line.at), marker="o", markersize=8, color=tint)
    for level in panel.levels:
        axes.axhline(level.y, linestyle="--", color=_GREY, linewidth=1)
        axes.annotate(level.text, (0.99, level.y), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", ha="right", fontsize=8, color=_GREY)  # fmt: skip
    for mark in panel.marks:
        axes.axvline(mark.x, linestyle=":", color=_GREY, linewidth=1.2)
        axes.annotate(mark.text, (mark.x, 0.98), xycoords=("data", "axes fraction"), xytext=(-3, 0), color=_GREY,
                      textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8)  # fmt: skip
    if panel.log_x:
        from matplotlib.ticker import LogLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_minor_formatter("")
    if panel.x_names:
        axes.set_xticks(range(len(panel.x_names)), panel.x_names, rotation=20)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.3, which="both")
    if len(panel.lines) > 1 or any(line.said for line in panel.lines):
        under = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}  # on no curve
        axes.legend(fontsize=9, frameon=False, ncols=2 if len(axes.figure.axes) == 1 else 1, **under)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ValueError("a plot as .png or .svg needs matplotlib: pip install 'thinwire[plot]'") from error
    return plt


def plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ValueError("a plot as .html, or a report, needs plotly: pip install 'thinwire[report]'") from error
    return go
