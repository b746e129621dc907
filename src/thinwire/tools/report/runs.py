"""Pictures of runs: those that a result contains, and those of logs that grow during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.core.records import made
from thinwire.tools.pictures import Mark, Panel, Picture, Series
from thinwire.tools.report.fields import Data, listed, maybe_number, table, tables
from thinwire.tools.report.log import steps_of

_POINTS = 1000


@dataclass(frozen=True)
class RunPicture:
    name: str
    picture: Picture


def read_run(name: str, data: Data) -> RunPicture:
    found = table(data["picture"], "'picture'")
    for line in (line for panel in tables(found, "panels") for line in tables(panel, "lines")):
        points = zip(listed(line, "x"), listed(line, "y"), strict=True)
        kept = [(x, y) for x, y in points if None not in (maybe_number({"x": x}, "x"), maybe_number({"y": y}, "y"))]
        line.update(x=[x for x, _ in kept], y=[y for _, y in kept])  # what is not finite is left out
    picture = made(Picture, found)
    if not picture.panels:
        raise ValueError("'panels' is empty")
    return RunPicture(name, picture)


def grouped(runs: Sequence[RunPicture]) -> list[Picture]:
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
        marks=tuple(dict.fromkeys(mark for panel in panels for mark in panel.marks)),
        levels=tuple(dict.fromkeys(level for panel in panels for level in panel.levels)),
    )


def read_step_log(name: str, records: Sequence[Any]) -> RunPicture:
    """Draw what was logged, such as a step's seconds and bytes, over the time since the first record."""
    runs, steps = [record for record in records if record.get("kind") == "run"], steps_of(records)
    try:
        began, method = float(runs[0]["time"]), str(runs[-1]["method"])
        marks = tuple(Mark(float(run["time"]) - began, f"started again at step {run['step']}") for run in runs[1:])
        clock = [float(step["time"]) - began for step in steps]

        def panel(axis: str, **lines: list[Any]) -> Panel:
            return Panel("seconds", axis, tuple(_thinned(label, clock, y) for label, y in lines.items()), marks)

        def each(counter: str, unit: float = 1.0) -> list[float]:
            return [step[counter] / step["steps"] / unit for step in steps]

        logged = dict.fromkeys(key for step in steps for key in step["values"])
        panels = [panel(key, **{method: [step["values"].get(key) for step in steps]}) for key in logged]
        waited = {"a step": each("seconds"), "of which waiting for the network": each("exposed_seconds")}
        panels.append(panel("seconds per step", **waited))
        panels.append(
            panel(
                "MB sent per step", **{method: each("bytes_sent", 1e6), "the whole gradient": each("dense_bytes", 1e6)}
            )
        )
        number = f"step {steps[-1]['step']}" if steps else "no step yet"
        return RunPicture(name, Picture(f"{method}, {runs[-1]['world_size']} workers, {number}", tuple(panels)))
    except (IndexError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"it is not in the format of StepLog ({error})") from error


def read_journal(name: str, lines: Sequence[Any]) -> RunPicture:
    """Draw how many updates each node contributed over time, and the age of its gradients."""
    nodes: dict[int, tuple[list[float], list[float], list[float]]] = {}
    try:
        for line in lines[1:]:
            for node, _, _, _, rows in line["parts"]:
                seconds, given, age = nodes.setdefault(int(node), ([], [], []))
                seconds.append(float(line["at"]))
                given.append(len(given) + 1)
                age.append(max((line["version"] - base for base, *_ in rows), default=0))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it is not in the format of a server's journal ({error})") from error
    totals = tuple(_thinned(f"node {n}", *nodes[n][:2]) for n in sorted(nodes))
    ages = tuple(_thinned(f"node {n}", *nodes[n][::2]) for n in sorted(nodes))
    panels = (
        Panel("seconds", "contributions so far", totals),
        Panel("seconds", "age of its gradients in updates", ages),
    )
    return RunPicture(name, Picture(f"{len(nodes)} nodes, {len(lines) - 1} updates", panels))


def _thinned(name: str, x: Sequence[float], y: Sequence[Any]) -> Series:
    """Return a line with a limited number of points, including the last one."""
    kept = [(a, b) for a, b in zip(x, y) if isinstance(b, (int, float)) and b == b]
    stride = -(-len(kept) // _POINTS) or 1
    kept = kept[::-1][::stride][::-1]
    return Series(name, tuple(a for a, _ in kept), tuple(b for _, b in kept))
