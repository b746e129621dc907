"""Runs that contain their own picture, as the ``"picture"`` of their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.tools.pictures import Level, Mark, Panel, Picture, Series
from thinwire.tools.report.fields import Data, maybe_number, number, numbers, table, tables, text


@dataclass(frozen=True)
class RunPicture:
    """A file and its picture."""

    name: str
    picture: Picture


def read_run(name: str, data: Data) -> RunPicture:
    """Read the picture in a result.

    Raises:
        ValueError: it does not have the format of :class:`Picture`.
    """
    found = table(data["picture"], "'picture'")
    panels = tuple(map(_panel, tables(found, "panels")))
    if not panels:
        raise ValueError("'panels' is empty")
    return RunPicture(name, Picture(text(found, "title"), panels))


def _panel(data: Data) -> Panel:
    asked = data.get("y_range")
    limits = None if asked is None else numbers(data, "y_range")
    if limits is not None and len(limits) != 2:
        raise ValueError("'y_range' is not a pair")
    return Panel(
        text(data, "x"),
        text(data, "y"),
        tuple(map(_line, tables(data, "lines"))),
        tuple(Mark(number(mark, "x"), text(mark, "text")) for mark in tables(data, "marks")),
        tuple(Level(number(level, "y"), text(level, "text")) for level in tables(data, "levels")),
        None if limits is None else (limits[0], limits[1]),
        data.get("log_x") is True,
    )


def _line(data: Data) -> Series:
    pairs = [
        (maybe_number({"x": x}, "x"), maybe_number({"y": y}, "y"))
        for x, y in zip(*(_column(data, key) for key in ("x", "y")), strict=True)
    ]
    kept = [(x, y) for x, y in pairs if x is not None and y is not None]
    at = None if data.get("at") is None else numbers(data, "at")
    if at is not None and len(at) != 2:
        raise ValueError("'at' is not a point")
    return Series(
        text(data, "name"), tuple(x for x, _ in kept), tuple(y for _, y in kept), text(data, "look") or "line",
        None if at is None else (at[0], at[1]), text(data, "said"),
    )  # fmt: skip


def _column(data: Data, key: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key!r} of a line is not a list")
    return value


def grouped(runs: Sequence[RunPicture]) -> list[Picture]:
    """Combine runs whose panels have the same axes into one picture."""
    groups: dict[tuple[tuple[str, str], ...], list[RunPicture]] = {}
    for run in runs:
        groups.setdefault(tuple((panel.x, panel.y) for panel in run.picture.panels), []).append(run)
    return [_together(group) for group in groups.values()]


def _together(runs: Sequence[RunPicture]) -> Picture:
    if len(runs) == 1:
        return runs[0].picture
    titles = list(dict.fromkeys(run.picture.title for run in runs))
    panels = zip(*(run.picture.panels for run in runs))
    names = [run.name for run in runs]
    return Picture("; ".join(titles), tuple(_panels_together(names, same) for same in panels))


def _panels_together(files: Sequence[str], panels: Sequence[Panel]) -> Panel:
    """Combine panels; a name that several files use is distinguished by its file's name or its place in the list."""
    all_names = [line.name for panel in panels for line in panel.lines]
    lines = []
    for place, (file, panel) in enumerate(zip(files, panels), 1):
        told = file if files.count(file) == 1 else f"{file}, {place}."
        for line in panel.lines:
            unique = all_names.count(line.name) == 1
            lines.append(line if unique else replace(line, name=f"{line.name} ({told})"))
    return replace(
        panels[0],
        lines=tuple(lines),
        marks=_once(mark for panel in panels for mark in panel.marks),
        levels=_once(level for panel in panels for level in panel.levels),
    )


def _once(found: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(found))
