"""Pictures of logs that grow during a run: a step log, and a parameter server's journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.tools.pictures import Mark, Panel, Picture, Series
from thinwire.tools.report.log import steps_of
from thinwire.tools.report.pictures import RunPicture

_POINTS = 1000


def read_step_log(name: str, records: Sequence[Any]) -> RunPicture:
    """Draw what was logged, such as a step's seconds and bytes, over the time since the first record.

    Raises:
        ValueError: the records are not as :class:`~thinwire.StepLog` writes them.
    """
    runs, steps = [record for record in records if record.get("kind") == "run"], steps_of(records)
    try:
        began, method = float(runs[0]["time"]), str(runs[-1]["method"])
        marks = tuple(Mark(float(run["time"]) - began, f"started again at step {run['step']}") for run in runs[1:])
        clock = [float(step["time"]) - began for step in steps]

        def panel(axis: str, **lines: list[Any]) -> Panel:
            return Panel("seconds", axis, tuple(_line(label, clock, y) for label, y in lines.items()), marks)

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
    """Draw how many updates each node contributed over time, and the age of its gradients.

    Raises:
        ValueError: the lines are not as the server writes them.
    """
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
    panels = (
        Panel("seconds", "contributions so far", tuple(_line(f"node {n}", *nodes[n][:2]) for n in sorted(nodes))),
        Panel(
            "seconds",
            "age of its gradients in updates",
            tuple(_line(f"node {n}", *nodes[n][::2]) for n in sorted(nodes)),
        ),
    )
    return RunPicture(name, Picture(f"{len(nodes)} nodes, {len(lines) - 1} updates", panels))


def _line(name: str, x: Sequence[float], y: Sequence[Any]) -> Series:
    """Return a line with a limited number of points, including the last one."""
    kept = [(a, b) for a, b in zip(x, y) if isinstance(b, (int, float)) and b == b]
    stride = -(-len(kept) // _POINTS) or 1
    kept = kept[::-1][::stride][::-1]
    return Series(name, tuple(a for a, _ in kept), tuple(b for _, b in kept))
