"""What was measured, as pages: ``python page.py``, from ``benchmarks/results/peers.json`` and ``tolls.json``.

All tables go to ``benchmarks/results/peers.md``, and the picture to ``docs``. ``python docs/made.py`` writes the
summary into ``docs/peers.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import store
from catalogue import TOLLS, TRIED

from thinwire.core.words import duration, megabytes
from thinwire.tools.bench.race_losses import StepsFactor, StepTimes, TimeToLoss, time_to_loss
from thinwire.tools.bench.rows import COMPUTE, TORCH_ROWS

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "benchmarks" / "results" / "peers.md"
PICTURES = ROOT / "docs" / "images"
FEDERATED = ROOT / "benchmarks" / "results" / "federated.json"
TOLLS_FILE = ROOT / "benchmarks" / "results" / "tolls.json"

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
        alone = f"{duration(min(compute))} to {duration(max(compute))}"
        lines = [f"### {named(cell)}", ""]
        lines.append(f"A step without any exchange: {alone}. Floor of an exact method: {duration(_floor(runs))}.")
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
        duration(row["step_seconds"]),
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
        row = (trained["rows"] | clocked["chosen"])[label]
        worth = StepsFactor(row["rate"], tuple(row["factors"]))
        made[label] = time_to_loss(label, StepTimes(**pace), clocked["compute_seconds"], worth, trained["steps"])
    return made


def tolls(results: Run) -> str:
    """Seconds to DDP's loss over those of DDP's steps without any exchange, and steps over DDP's; medians and ends."""
    found = json.loads(TOLLS_FILE.read_text())
    return "\n\n".join(_tolls_of(one, found["clocked"]) for one in found["trained"])


def _tolls_of(trained: Run, clocked: list[Run]) -> str:
    """The table of one size and number of workers."""
    size, workers = trained["name"].split("/")
    where = f"{workers} workers, {trained['steps']:,} steps"
    factors = {label: _three(row["factors"]) for label, row in trained["rows"].items()}
    columns = [(f"steps, {size}, {where}", factors)]
    for network in (one for one in clocked if one["name"] == trained["name"]):
        alone = trained["steps"] * network["compute_seconds"]
        ended = finishes(trained, network)
        over = {label: _three([seconds / alone for seconds in row.times]) for label, row in ended.items()}
        columns.append((f"time, {size}, {network['link']}, {workers} workers", over))
    lines = ["| row | " + " | ".join(name for name, _ in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in TOLLS[trained["name"]].rows:
        name = title({"label": row.label, "kind": row.kind})
        cells = [_cell(row.label, column, bold=head.startswith("time")) for head, column in columns]
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


@dataclass(frozen=True)
class Best:
    """The first of some rows on one network: what it is called, and its least, median and most times."""

    name: str
    times: Three


@dataclass(frozen=True)
class Verdict:
    """The best row of thinwire on one network beside the best of the others; times are over DDP's without a network.

    ``alone``, ``ddp`` and ``local``: the median times of one worker, of DDP and of ``"local"`` as it comes, where they
    were timed.
    """

    where: str
    ours: Best
    other: Best
    ddp: float | None
    local: float | None = None
    alone: float = math.inf

    @property
    def words(self) -> str:
        """Who takes how much less time, and whether the seeds' ranges say so too."""
        first, second = sorted((self.ours, self.other), key=lambda best: best.times[1])
        who = "thinwire" if first is self.ours else first.name
        less = 100 * (1 - first.times[1] / second.times[1])
        if less < 1:
            return "equal"
        overlap = first.times[2] >= second.times[0]
        return f"{who}: {less:.0f} %" + (", within the spread of seeds" if overlap else "")


def verdicts() -> list[Verdict]:
    """Of every network."""
    found = json.loads(TOLLS_FILE.read_text())
    trained = {one["name"]: one for one in found["trained"]}
    return [_verdict(trained[one["name"]], one) for one in found["clocked"]]


def _verdict(trained: Run, clocked: Run) -> Verdict:
    kinds = {row.label: row.kind for row in TOLLS[trained["name"]].rows}
    alone = trained["steps"] * clocked["compute_seconds"]
    bests: dict[bool, list[Best]] = {True: [], False: []}
    local, lone = None, math.inf
    for label, row in finishes(trained, clocked).items():
        name = title({"label": label, "kind": kinds[label]})
        best = Best(name, _three([seconds / alone for seconds in row.times]))
        if label == "alone":  # which is no library
            lone = best.times[1]
        elif label in clocked["chosen"]:
            local = best.times[1]
        else:
            bests[name.startswith("thinwire")].append(best)
    ours, other = (min(bests[mine], key=lambda best: best.times[1]) for mine in (True, False))
    ddp = next((best.times[1] for best in bests[False] if best.name.startswith("DDP, as")), None)
    size, workers = trained["name"].split("/")
    rate, *wire = clocked["link"].split()
    link = rate.replace("gbit", " Gb/s").replace("mbit", " Mb/s")
    link += ", {} one way, {} lost".format(*(w.replace("ms", " ms").replace("%", " %") for w in wire)) if wire else ""
    return Verdict(f"{size}, {workers} workers, {link}", ours, other, ddp, local, lone)


def summary() -> str:
    """The table of docs/peers.md."""
    head = ("size and network", "worth", '`"local"` as it comes', "best thinwire row", "best other library")
    head += ("less time for",)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for one in verdicts():
        mine = one.ours.name.removeprefix("thinwire ")
        local = ("-", "-") if one.local is None else (f"{one.alone / one.local:.2f}", f"{one.local:.2f}")
        bests = (f"{one.ours.times[1]:.2f}: `{mine}`", f"{one.other.times[1]:.2f}: {one.other.name}")
        lines.append(f"| {' | '.join((one.where, *local, *bests, one.words))} |")
    return "\n".join(lines)


HEAD = """# All rows beside other libraries

Made by `python page.py` in `benchmarks/peers`; docs/peers.md has the summary. A cell with "-" is a row that this size
or network does without.
"""
SECTIONS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "Seconds to DDP's loss, over DDP's steps without a network": (
        "Medians and ends over seeds. *Steps*: steps to DDP's final loss in whole runs, over DDP's, each row at the "
        "learning rate that serves it best, on workers that nothing slows down. *Time*: steps times "
        "the seconds of a step on the link, all rows in turns, first steps included, over DDP's steps if nothing "
        "were exchanged; the best is bold. Accelerate's and torchft's LocalSGD average the same weights after the "
        'same steps, so only one of them was trained. thinwire local is `"local"` as it comes; its steps are '
        "those that the planner has, by this model's rows, for what it chose. hivemind is missing, "
        "because its workers find each other by time.",
        tolls,
    ),
    "First at a loss, one seed": ("Times sooner than DDP in the same run, in brackets; more is better.", winners),
    "Times sooner at a loss than DDP, one seed": ("More is better.", losses),
    "Times faster than DDP, by steps": ("More is better.", steps),
    "Every run": (
        "Rows of a run take turns on the same ranks, and each run has its own DDP row. *Step*: the slowest rank's,"
        " median over turns. *To the loss*: seconds of training; building a row and judging it do not count.",
        details,
    ),
    "Setting": ("One worker a machine, one thread a rank, no added delay unless a column says so.", setting),
    "Peers that are not in it": ("What pip or the import said.", missing),
    "Federated simulations": ("Recorded by `benchmarks/federated.py`, 100 clients a round; less is better.", federated),
}


def tables(results: Run) -> str:
    """benchmarks/results/peers.md."""
    parts = [f"## {name}\n\n{words}\n\n{block(results)}\n" for name, (words, block) in SECTIONS.items()]
    return "\n".join([HEAD, *parts])


def main() -> None:
    from pictures import draw_times

    results = store.read()
    TABLES.write_text(tables(results))
    PICTURES.mkdir(exist_ok=True)
    draw_times(verdicts(), PICTURES / "peers_times.png")
    print(f"wrote {TABLES} and peers_times.png")


if __name__ == "__main__":
    main()
