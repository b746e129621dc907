"""Which method wins where: a map of bandwidth against workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from thinwire.tools.pictures.colours import Colours, ink
from thinwire.tools.pictures.draw import plotly
from thinwire.tools.report.figures import new
from thinwire.tools.report.inputs import Inputs
from thinwire.tools.report.predictions import WinnerCell, WinnerMap
from thinwire.tools.report.section import Block, Chart, Section
from thinwire.tools.report.words import bits, duration, factor, hover

_READING = (
    "Each cell is a cluster: a number of workers, joined by links of one rate. Its colour is the method that the "
    "planner recommends there; the number (where there is room) says how many times faster it reaches a loss than "
    "the fastest dense method (one that sends the whole gradient). Where the number is near 1, there is nothing to "
    "gain. Point at a cell for the reason."
)
_TEXT_COLUMNS = 16  # with more, cells are too narrow for a number


def section(inputs: Inputs, colours: Colours) -> Section | None:
    """Return the section; None without a map."""
    maps = [found for found in inputs.maps if found.known]
    if not maps:
        return None
    return Section("map", "Which method wins where", _READING, tuple(_block(found, colours) for found in maps))


def _block(found: WinnerMap, colours: Colours) -> Block:
    wins = Counter(cell.winner for cell in found.known)
    said = ", ".join(f"{name} in {count}" for name, count in wins.most_common())
    best = max(found.known, key=lambda cell: cell.factor)
    line = f"Of {len(found.known)} clusters: {said}. The largest gain is {factor(best.factor)}, with {best.winner}."
    charts = [Chart(_figure(found, colours, exact=False), "All methods")]
    exact = Counter(cell.winner_exact for cell in found.known if cell.winner_exact)
    if len(exact) > 1 and any(cell.winner_exact != cell.winner for cell in found.known):
        charts.append(Chart(_figure(found, colours, exact=True), "Exact methods only"))
    elif len(exact) == 1:
        line += f" Of the exact methods, {next(iter(exact))} is best everywhere."
    names = dict.fromkeys([name for name, _ in wins.most_common()] + [name for name, _ in exact.most_common()])
    legend = tuple((colours.of(name), name) for name in names if name in wins or len(charts) > 1)
    return Block(found.name, tuple(filter(None, (found.facts, line))), tuple(charts), legend)


def _figure(found: WinnerMap, colours: Colours, *, exact: bool) -> Any:
    go = plotly()

    def named(cell: WinnerCell | None) -> str:
        return "" if cell is None else (cell.winner_exact or cell.winner if exact else cell.winner)

    across = [f"{count:,}" for count in found.workers]
    up = [bits(rate) for rate in found.bits_per_second]
    width = 2 if len(across) <= 30 else 0
    figure = new(80 + 36 * len(up))
    for name, _ in Counter(map(named, found.known)).most_common():
        mine = [[cell if named(cell) == name else None for cell in row] for row in found.cells]
        numbered = not exact and len(across) <= _TEXT_COLUMNS
        colour = colours.of(name)
        figure.add_trace(
            go.Heatmap(
                x=across,
                y=up,
                z=[[None if cell is None else 1 for cell in row] for row in mine],
                text=[[factor(cell.factor) if cell and numbered else "" for cell in row] for row in mine],
                texttemplate="%{text}",
                textfont={"color": ink(colour), "size": 13},
                hovertext=[
                    [_hover(found, i, j) if cell else "" for j, cell in enumerate(row)] for i, row in enumerate(mine)
                ],
                hoverinfo="text",
                hoverongaps=False,
                colorscale=[[0, colour], [1, colour]],
                zmin=0,
                zmax=1,
                showscale=False,
                xgap=width,
                ygap=width,
            )
        )
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=across, title_text="number of workers", fixedrange=True
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=up,
        title_text="rate of each link (bit/s)",
        fixedrange=True,
    )
    figure.update_xaxes(showgrid=False, showline=False)
    return figure.update_yaxes(showgrid=False, ticklabelstandoff=4)


def _hover(found: WinnerMap, i: int, j: int) -> str:
    cell = found.cells[i][j]
    assert cell is not None
    gain = f"{factor(cell.factor)} faster than dense" if cell.factor > 1.005 else "as fast as dense"
    return hover(
        f"{cell.winner}: {gain}",
        f"{found.workers[j]:,} workers, {bits(found.bits_per_second[i])}",
        f"step {duration(cell.step_seconds)}, dense {duration(cell.dense_seconds)}",
        f"best exact method: {cell.winner_exact}" if cell.winner_exact else "",
        cell.why,
    )
