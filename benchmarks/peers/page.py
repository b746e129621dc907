"""Write the tables of ``docs/peers.md`` and its pictures from ``benchmarks/results/peers.json``: ``python page.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import store
from catalogue import TOLLS, TRIED

from thinwire.core.words import megabytes, seconds
from thinwire.tools.bench.race_answer import StepTimes, TimeToLoss, time_to_loss
from thinwire.tools.bench.race_losses import StepsFactor
from thinwire.tools.bench.rows import COMPUTE, TORCH_ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"
PICTURES = ROOT / "docs" / "images"
FEDERATED = ROOT / "benchmarks" / "results" / "federated.json"
TOLLS_FILE = ROOT / "benchmarks" / "results" / "tolls.json"
DRAWN = (
    "ddp",
    "ddp-fp16",
    "torch-powersgd rank=4",
    "ssgd",
    "cast dtype=int8",
    "powersgd rank=4",
    "local sync_every=4 codec=int8",
    "local sync_every=8 codec=int8 fragment_sync_delay=3",
    "Accelerate LocalSGD",
    "torchft LocalSGD",
    "torchft DiLoCo",
    "hivemind, local updates",
)

Run = dict[str, Any]
Row = dict[str, Any]
Cell = tuple[str, str, int]
"""Size of the model, link, workers."""
Three = tuple[float, float, float]
"""The least, the median and the most."""


def title(row: Row) -> str:
    """What the page calls a row."""
    words = {
        "ddp": "DDP, as it comes",
        "ddp-fp16": "DDP, fp16 hook",
        "alone": "one worker alone",
        "accumulate every=4": "DDP, accumulating 4 steps",
        "torch-powersgd rank=4": "DDP, torch's PowerSGD hook, rank 4",
    }
    label = str(row["label"])
    if label.startswith("ddp-best"):
        return f"DDP, best bucket {label.removeprefix('ddp-best ')}"
    if row["kind"] in TORCH_ROWS or ":" in row["kind"]:
        return words.get(label, label)
    return f"thinwire {label}"


def shown(run: Run) -> list[Row]:
    """The rows of a run that the tables show: without the one that only computes, of DDP's buckets the fastest."""
    rows = [row for row in run["rows"] if row["kind"] != COMPUTE]
    tuned = [row for row in rows if row["label"].startswith("ddp-best")]
    best = min(tuned, key=lambda row: row["step_seconds"] or float("inf"), default=None)
    return [row for row in rows if row not in tuned or row is best]


def cell_of(run: Run) -> Cell:
    """Where a run belongs."""
    return run["size"], run["link"], run["workers"]


def cells(results: Run) -> list[Cell]:
    """In the order of the runs."""
    return list(dict.fromkeys(cell_of(run) for run in results["runs"]))


def of_cell(results: Run, cell: Cell) -> list[Run]:
    """The runs of one model, on one link, with so many workers."""
    return [run for run in results["runs"] if cell_of(run) == cell]


def named(cell: Cell) -> str:
    """As headings say it."""
    return f"{cell[0]}, {cell[1]}, {cell[2]} workers"


def _family(row: Row) -> str:
    return re.sub(r" \(.*", "", title(row))


def _overview(results: Run, figure: Callable[[Row], str]) -> str:
    """A line a row, a column a cell; a row that is in several runs shows its first."""
    found: dict[str, dict[Cell, str]] = {}
    for run in results["runs"]:
        for row in shown(run):
            if row["label"] != "ddp":
                found.setdefault(_family(row), {}).setdefault(cell_of(run), figure(row))
    columns = cells(results)
    lines = ["| row | " + " | ".join(map(named, columns)) + " |"]
    lines.append("|---" + "|---:" * len(columns) + "|")
    for name, figures in found.items():
        lines.append(f"| {name} | " + " | ".join(figures.get(column, "-") for column in columns) + " |")
    return "\n".join(lines)


def _to_loss(row: Row) -> str:
    if row["error"]:
        return "failed"
    return f"{1 / row['target_ratio']:.2f}" if row["target_ratio"] else "not reached"


def _step(row: Row) -> str:
    return "failed" if row["error"] or not row["step_ratio"] else f"{1 / row['step_ratio']:.2f}"


def losses(results: Run) -> str:
    """How many times sooner at the loss than DDP."""
    return _overview(results, _to_loss)


def steps(results: Run) -> str:
    """How many times faster a step is than DDP's."""
    return _overview(results, _step)


def winners(results: Run) -> str:
    """Of every cell: the first at the loss, thinwire's first, and the others that were there before it."""
    lines = ["| model, link | first at the loss | thinwire's first | others before it |", "|---|---|---|---|"]
    for cell in cells(results):
        there = [(row["target_ratio"], row) for run in of_cell(results, cell) for row in shown(run)]
        there = sorted(((ratio, row) for ratio, row in there if ratio), key=lambda pair: pair[0])
        ours = next(((r, row) for r, row in there if title(row).startswith("thinwire")), None)
        if not there or ours is None:
            continue
        before = dict.fromkeys(f"{title(row)} ({1 / r:.2f})" for r, row in there if r < ours[0])
        first = f"{title(there[0][1])} ({1 / there[0][0]:.2f})"
        mine = f"{title(ours[1])} ({1 / ours[0]:.2f})"
        lines.append(f"| {named(cell)} | {first} | {mine} | {'; '.join(before) or 'none'} |")
    return "\n".join(lines)


def details(results: Run) -> str:
    """All rows of all runs."""
    parts = []
    for cell in cells(results):
        runs = of_cell(results, cell)
        compute = [row["step_seconds"] for run in runs for row in run["rows"] if row["kind"] == COMPUTE]
        alone = f"{seconds(min(compute))} to {seconds(max(compute))}"
        lines = [f"### {named(cell)}", ""]
        lines.append(f"A step without any exchange: {alone}. Floor of an exact method: {seconds(_floor(runs))}.")
        lines += ["", "| row | step | x | MB per step | steps made | to the loss | x | last loss |"]
        lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
        for number, run in enumerate(runs, 1):
            for row in shown(run):
                lines.append(_detail(row, f" (run {number})" if row["label"] == "ddp" else ""))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _floor(runs: list[Run]) -> float:
    return min(float(run["floor_seconds"]) for run in runs)


def _detail(row: Row, more: str) -> str:
    name = f"**{title(row)}{more}**" if more else title(row)
    if row["error"]:
        return f"| {name} | failed: {row['error']} | | | {row['steps']} | | | |"
    reached = "not reached" if row["target_seconds"] is None else f"{row['target_seconds']:.1f} s"
    figures = [
        seconds(row["step_seconds"]),
        _step(row),
        megabytes(row["bytes_per_step"]),
        str(row["steps"]),
        reached,
        "-" if row["target_seconds"] is None else _to_loss(row),
        "-" if row["last_loss"] is None else f"{row['last_loss']:.3f}",
    ]
    return f"| {name} | " + " | ".join(figures) + " |"


def setting(results: Run) -> str:
    """What was trained, on what, with which versions."""
    machine, versions, lines = results["machine"], results["versions"], []
    for name, told in results["settings"].items():
        run = next(run for run in results["runs"] if run["size"] == name)
        size = f"{run['parameters'] / 1e6:.2f} million parameters, {run['gradient_bytes'] / 1e6:.2f} MB of gradients"
        lines.append(
            f"* {name}: {run['describe']}; {size}; AdamW (`{told['model']}`); until a held-out loss of "
            f"{told['target']} nats per character, at most {told['most_steps']} steps."
        )
    return "\n".join(
        [
            *lines,
            f"* Machine: {machine['cores']} shared cores, Python {machine['python']}. "
            + ", ".join(f"{name} {version.partition('+')[0]}" for name, version in versions.items())
            + ".",
        ]
    )


def missing(results: Run) -> str:
    """Peers that were not compared, and pip's line."""
    lines = ["| peer | `pip install` | what it says |", "|---|---|---|"]
    for name, (peer, _) in TRIED.items():
        if name not in results["tried"]:
            continue
        error = results["tried"][name]
        said = error.replace("|", "\\|") if error else "installs; not compared"
        lines.append(f"| {peer} | `{name}` | {said} |")
    return "\n".join(lines)


def federated(results: Run) -> str:
    """The recorded rounds of benchmarks/federated.py."""
    lines = ["| simulation | seconds a round | x thinwire |", "|---|---:|---:|"]
    for name, row in json.loads(FEDERATED.read_text())["speed"].items():
        lines.append(f"| {name} | {row['median']:.3f} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def finishes(trained: Run, clocked: Run) -> dict[str, TimeToLoss]:
    """Of every row that was timed on one network, by label: steps to DDP's loss times seconds of a step."""
    made = {}
    for label, pace in clocked["paces"].items():
        row = trained["rows"][label]
        worth = StepsFactor(row["rate"], tuple(row["factors"]))
        made[label] = time_to_loss(label, StepTimes(**pace), clocked["compute_seconds"], worth, trained["steps"])
    return made


def tolls(results: Run) -> str:
    """Seconds to DDP's loss over those of DDP's steps without any exchange, and steps over DDP's; medians and ends."""
    found = json.loads(TOLLS_FILE.read_text())
    return "\n\n".join(_tolls_of(one, found["clocked"]) for one in found["trained"])


def _tolls_of(trained: Run, clocked: list[Run]) -> str:
    """The table of one size and number of workers."""
    size, workers, *whole = trained["name"].split("/")
    where = f"{workers} workers" + "".join(f", whole runs of {steps} steps" for steps in whole)
    factors = {label: _three(row["factors"]) for label, row in trained["rows"].items()}
    columns = [(f"steps, {size}, {where}", factors)]
    for network in (one for one in clocked if one["name"] == trained["name"]):
        alone = trained["steps"] * network["compute_seconds"]
        ended = finishes(trained, network)
        over = {label: _three([seconds / alone for seconds in row.times]) for label, row in ended.items()}
        columns.append((f"toll, {size}, {network['link']}, {workers} workers", over))
    lines = ["| row | " + " | ".join(name for name, _ in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in TOLLS[trained["name"]].rows:
        name = title({"label": row.label, "kind": row.kind})
        cells = [_cell(row.label, column, bold=head.startswith("toll")) for head, column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _three(factors: list[float | None]) -> Three:
    ordered = sorted(float("inf") if factor is None else factor for factor in factors)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]


def _cell(label: str, column: dict[str, Three], *, bold: bool) -> str:
    """The median and the ends; ``bold``: where no other row's median is lower."""
    if label not in column:
        return "-"
    low, middle, high = ("never" if x == float("inf") else f"{x:.2f}" for x in column[label])
    first = column[label][1] == min(values[1] for values in column.values())
    return f"**{middle}** ({low} to {high})" if bold and first else f"{middle} ({low} to {high})"


BLOCKS: dict[str, Callable[[Run], str]] = {
    "setting": setting,
    "winners": winners,
    "losses": losses,
    "steps": steps,
    "tolls": tolls,
    "details": details,
    "missing": missing,
    "federated": federated,
}


def fill(text: str, results: Run) -> str:
    """The page with every block between ``<!-- NAME -->`` and ``<!-- /NAME -->`` written anew.

    Raises:
        ValueError: the page lacks a block.
    """
    for name, block in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE} has no block <!-- {name} --> ... <!-- /{name} -->")
        made = f"\n{block(results)}\n\n"
        text = pattern.sub(lambda found, made=made: found[1] + made + found[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    from pictures import draw_curves, draw_steps

    results = store.read()
    PAGE.write_text(fill(PAGE.read_text(), results))
    PICTURES.mkdir(exist_ok=True)
    draw_curves(results, PICTURES / "peers_loss.png")
    draw_steps(results, PICTURES / "peers_steps.png")
    print(f"wrote {PAGE.name}, peers_loss.png and peers_steps.png")


if __name__ == "__main__":
    main()
