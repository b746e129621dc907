"""The HTML page: texts escaped, pictures and plotly's JavaScript inlined, nothing loaded from elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

from thinwire import __version__
from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.picture import plotly
from thinwire.tools.report.figures import Block, Section
from thinwire.tools.report.inputs import Bench, InputFile, Inputs
from thinwire.tools.report.runs import RunPicture
from thinwire.tools.report.sections import SECTIONS

_CONFIG: dict[str, Any] = {"responsive": True, "displayModeBar": False, "displaylogo": False}


def render(inputs: Inputs) -> str:
    """Return the whole page.

    Raises:
        ValueError: plotly is missing, or the files hold no results.
    """
    plotly()
    colours = Colours(inputs.labels())
    made = [section for make in SECTIONS if (section := make(inputs, colours)) is not None]
    if not made:
        raise ValueError("the files contain no results: " + ", ".join(source.name for source in inputs.sources))
    pictures = itertools.count(1)
    body = "\n".join(_section(section, pictures) for section in made)
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in made)
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>thinwire report</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>thinwire report</h1>
<p>{escape(_summary(inputs))}</p>
<nav>{links}</nav>
</header>
<main>
{body}
{_sources(inputs.sources)}
</main>
<footer>thinwire {escape(__version__)}. This page needs no network.</footer>
</body>
</html>
"""


def _picture(figure: Any, number: Iterator[int]) -> str:
    """Return a figure as HTML; the first one brings plotly's JavaScript."""
    here, height = next(number), f"{figure.layout.height}px"
    html: str = figure.to_html(full_html=False, include_plotlyjs=here == 1, div_id=f"picture-{here}", config=_CONFIG,
                               default_height=height)  # fmt: skip
    return html


def _summary(inputs: Inputs) -> str:
    said = list(dict.fromkeys(bench.where for bench in inputs.of(Bench)))
    measured = any(not trace.predicted for trace in inputs.traces)
    said += list(dict.fromkeys(run.picture.title for run in inputs.of(RunPicture)))
    if not said and not measured:
        return "Everything on this page was predicted; nothing was measured."
    return "Measured: " + ("; and ".join(said) or "one step, see the timeline") + "."


def _section(section: Section, pictures: Iterator[int]) -> str:
    blocks = "\n".join(_block(block, pictures) for block in section.blocks)
    return (
        f'<section id="{section.anchor}">\n<h2>{escape(section.title)}</h2>\n'
        f'<p class="reading">{escape(section.reading)}</p>\n{blocks}\n</section>'
    )


def _block(block: Block, pictures: Iterator[int]) -> str:
    parts = [f"<h3>{escape(block.heading)}</h3>"] if block.heading else []
    parts += [f"<p>{escape(line)}</p>" for line in block.lines]
    if block.legend:
        parts.append('<p class="legend">' + "".join(map(_mark, block.legend)) + "</p>")
    if block.charts:
        pair = len(block.charts) == 2
        shares = f' style="--left: {block.charts[0].share}fr; --right: {block.charts[1].share}fr"' if pair else ""
        inside = "\n".join(
            (f"<div><h4>{escape(chart.caption)}</h4>" if chart.caption else "<div>")
            + f"{_picture(chart.figure, pictures)}</div>"
            for chart in block.charts
        )
        parts.append(f'<div class="charts{" pair" if pair else ""}"{shares}>\n{inside}\n</div>')
    if block.table:
        parts.append(f'<div class="scroll">{_table(block.table)}</div>')
    if block.notes:
        parts.append('<div class="notes">' + "".join(f"<p>{escape(note)}</p>" for note in block.notes) + "</div>")
    return "\n".join(parts)


def _mark(mark: tuple[str, str]) -> str:
    look, meaning = mark
    shown = f'class="square" style="background: {look}"' if look.startswith("#") else f'class="{look}"'
    return f"<span><i {shown}></i>{escape(meaning)}</span>"


def _table(rows: tuple[tuple[str, ...], ...], kind: str = "figures") -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f'<table class="{kind}">' + "\n".join(lines) + "</table>"


def _sources(sources: tuple[InputFile, ...]) -> str:
    rows = (("file", "contents", "written"), *((s.name, s.holds, s.written) for s in sources))
    return f'<section id="sources">\n<h2>Files</h2>\n{_table(rows, "sources")}\n</section>'
