"""What was predicted: which method wins where, and the ranking for one cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from thinwire.core.words import duration, factor, rate, volume
from thinwire.predict.choose import Entry, Map, Ranking
from thinwire.predict.choose.grid import Cell
from thinwire.tools.pictures.colours import Colours, ink
from thinwire.tools.pictures.picture import plotly
from thinwire.tools.report.figures import (
    BAR,
    Block,
    Chart,
    Section,
    StepBar,
    hover,
    new,
    scale,
    short,
    stacked,
    step_bars,
)
from thinwire.tools.report.inputs import Inputs, Planned

_MAP = (
    "Each cell is a cluster: a number of workers, joined by links of one rate. Its colour is the method that the "
    "planner recommends there; the number (where there is room) says what these workers are worth: how many times as "
    "soon as one worker alone they reach a loss. Where it is near 1, one worker does. Point at a cell for the reason."
)
_TEXT_COLUMNS = 16  # with more, cells are too narrow for a number


def map_section(inputs: Inputs, colours: Colours) -> Section | None:
    maps = [(plan, plan.found) for plan in inputs.of(Planned) if isinstance(plan.found, Map) and any(plan.found.cells)]
    if not maps:
        return None
    blocks = tuple(_map_block(plan.name, plan.facts, found, colours) for plan, found in maps)
    return Section("map", "Which method wins where", _MAP, blocks)


def _map_block(name: str, facts: str, found: Map, colours: Colours) -> Block:
    cells = [cell for row in found.cells for cell in row]
    wins = Counter(cell.winner for cell in cells)
    said = ", ".join(f"{name} in {count}" for name, count in wins.most_common())
    best = max(cells, key=lambda cell: cell.worth)
    line = f"Of {len(cells)} clusters: {said}. At most they are worth {factor(best.worth)}, with {best.winner}."
    charts = [Chart(_map_figure(found, colours, exact=False), "All methods")]
    exact = Counter(cell.winner_exact for cell in cells)
    if len(exact) > 1 and any(cell.winner_exact != cell.winner for cell in cells):
        charts.append(Chart(_map_figure(found, colours, exact=True), "Exact methods only"))
    elif len(exact) == 1:
        line += f" Of the exact methods, {next(iter(exact))} is best everywhere."
    names = dict.fromkeys([name for name, _ in wins.most_common()] + [name for name, _ in exact.most_common()])
    legend = tuple((colours.of(name), name) for name in names if name in wins or len(charts) > 1)
    return Block(name, tuple(filter(None, (facts, line))), tuple(charts), legend)


def _map_figure(found: Map, colours: Colours, *, exact: bool) -> Any:
    def named(cell: Cell) -> str:
        return cell.winner_exact if exact else cell.winner

    across, up = [f"{count:,}" for count in found.workers], [rate(bits / 8) for bits in found.bits_per_second]
    gap = 2 if len(across) <= 30 else 0
    numbered = not exact and len(across) <= _TEXT_COLUMNS
    figure = new(80 + 36 * len(up))
    for name, _ in Counter(named(cell) for row in found.cells for cell in row).most_common():
        mine = [[cell if named(cell) == name else None for cell in row] for row in found.cells]
        colour = colours.of(name)
        figure.add_trace(
            plotly().Heatmap(
                x=across,
                y=up,
                z=[[None if cell is None else 1 for cell in row] for row in mine],
                text=[[factor(cell.worth) if cell and numbered else "" for cell in row] for row in mine],
                texttemplate="%{text}",
                textfont={"color": ink(colour), "size": 13},
                hovertext=[
                    [_cell_hover(found, i, j, cell) if cell else "" for j, cell in enumerate(row)]
                    for i, row in enumerate(mine)
                ],
                hoverinfo="text",
                hoverongaps=False,
                colorscale=[[0, colour], [1, colour]],
                zmin=0,
                zmax=1,
                showscale=False,
                xgap=gap,
                ygap=gap,
            )
        )
    axis = {"type": "category", "categoryorder": "array", "fixedrange": True, "showgrid": False}
    figure.update_xaxes(categoryarray=across, title_text="number of workers", showline=False, **axis)
    return figure.update_yaxes(categoryarray=up, title_text="rate of each link (bit/s)", ticklabelstandoff=4, **axis)


def _cell_hover(found: Map, i: int, j: int, cell: Cell) -> str:
    return hover(
        f"{cell.winner}: worth {factor(cell.worth)} of one worker alone",
        f"{found.workers[j]:,} workers, {rate(found.bits_per_second[i] / 8)}",
        f"step {duration(cell.step_seconds)}, dense {duration(cell.dense_seconds)}",
        f"best exact method: {cell.winner_exact}",
        cell.why,
    )


_RANKING = (
    "Each bar is the predicted time of one training step; shorter is better. The hatched end is exposed "
    "communication: time in which the network works and nothing is computed. The thin line is the band in which the "
    "step should lie. Next to it is what bounds the step, that is, what to improve next. Exact methods change "
    "nothing in the result; lossy ones send less and need more steps to the same loss: how many, where that was "
    "measured, is shown after the bar."
)


def ranking_section(inputs: Inputs, colours: Colours) -> Section | None:
    blocks = []
    for plan in inputs.of(Planned):
        if isinstance(plan.found, Ranking):
            lines = tuple(filter(None, (plan.found.sentence, plan.facts)))
            notes = tuple(f"Left out: {label}: {reason}" for label, reason in plan.found.left_out)
            chart = Chart(_ranking_figure(plan.found.entries, colours))
            blocks.append(Block(plan.name, lines, (chart,), notes=notes))
    return Section("ranking", "Predicted ranking", _RANKING, tuple(blocks)) if blocks else None


def _ranking_figure(entries: Sequence[Entry], colours: Colours) -> Any:
    groups = [("exact", [e for e in entries if e.exact]), ("lossy", [e for e in entries if not e.exact])]
    groups = [(title, sorted(group, key=lambda e: e.step_seconds)) for title, group in groups if group]
    longest = max(max(e.high_seconds, e.step_seconds) for e in entries)
    unit, unit_name = scale(longest)
    bars = [len(group) for _, group in groups]
    height = 90 + BAR * sum(bars) + 36 * len(groups)
    gap = 46 / height if len(groups) > 1 else 0.0
    figure = stacked([title for title, _ in groups], bars, gap, height, barmode="stack", showlegend=False)
    for row, (_, group) in enumerate(groups, start=1):
        _method_bars(figure, row, group, colours, unit)
    figure.update_xaxes(range=[0, longest * unit * 1.6], fixedrange=True)
    figure.update_xaxes(title_text=f"predicted step ({unit_name})", row=len(groups), col=1)
    return figure


def _method_bars(figure: Any, row: int, group: Sequence[Entry], colours: Colours, unit: float) -> None:
    bars = [
        StepBar(e.label, colours.of(e.label), e.step_seconds, e.exposed_seconds, e.low_seconds, e.high_seconds,
                _method_hover(e)) for e in group
    ]  # fmt: skip
    keys = step_bars(figure, bars, unit, 34, row=row, col=1)
    ends = [max(bar.high, bar.seconds) * unit for bar in bars]
    said = ["  " + short(f"{_told(e)}, {e.bound_by}") for e in group]
    look = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False}
    figure.add_trace(plotly().Scatter(x=ends, y=keys, text=said, **look), row=row, col=1)


def _told(entry: Entry) -> str:
    return duration(entry.step_seconds) + ("" if entry.exact or entry.steps is None else f" x {entry.steps:.2f} steps")


def _method_hover(entry: Entry) -> str:
    return hover(
        entry.label,
        f"step {duration(entry.step_seconds)} ({duration(entry.low_seconds)} to {duration(entry.high_seconds)})",
        f"exposed communication {duration(entry.exposed_seconds)}",
        f"{volume(entry.bytes_sent)} sent by a rank in a step",
        "" if entry.steps is None else f"{entry.steps:.2f} steps to a loss for each step of exact averaging",
        f"bound by {entry.bound_by}",
    )
