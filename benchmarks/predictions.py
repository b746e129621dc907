"""How good are the planner's predictions? ``python benchmarks/predictions.py --models chargpt --workers 2``

In the lab: methods x links x workers x models. Of each cell the step that the simulator predicts, from the network and
the model as measured just before, beside the measured one; the whole grid ``--repeats`` times, and of every cell the
median prediction and the median measurement. Prints a table, the median and the worst error, and how often the method
that is ranked first is within 5 % of the fastest; writes ``benchmarks/results/predictions.json`` after every network.
What was not rerun stays in the file: ``--show`` prints it as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import in_lab

RESULTS = Path(__file__).parent / "results" / "predictions.json"
METHODS = "ssgd,cast:dtype=bf16,acp:rank=4,topk:density=0.01,omgs:density=0.01"
# So long selection and its kin fault in memory: what is predicted is the step after that. One turn a row, too, since a
# machine that takes back memory which rests for seconds makes the first steps of every later turn slow.
WARMUP = 8
MODELS = ("chargpt", "mlp:width=1024:layers=8:batch=64")


@dataclass(frozen=True)
class Cell:
    """One method on one network; ``runs``: (measured, predicted) of each repetition, of which the medians count."""

    model: str
    link: str
    workers: int
    method: str
    measured: float
    predicted: float
    runs: tuple[tuple[float, float], ...] = ()

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


def measure(model: str, link: str, workers: int, rounds: int, steps: int) -> list[Cell]:
    limit = None if link == "unlimited" else link
    result = in_lab.run(model, METHODS, workers, limit, steps=steps, rounds=rounds, predict=True, warmup=WARMUP)
    cells = []
    for row in result.rows:
        if row.error:
            print(f"    {row.label}: {row.error}", file=sys.stderr)
        elif row.predicted_seconds is not None and row.step_seconds is not None:
            cells.append(Cell(model, link, workers, row.label, row.step_seconds, row.predicted_seconds))
    return cells


def merged(earlier: list[Cell], fresh: list[Cell]) -> list[Cell]:
    """The cells of one network with those of this run's earlier repetitions."""
    known = {c.method: c.runs for c in earlier}
    cells = []
    for c in fresh:
        runs = (*known.get(c.method, ()), (c.measured, c.predicted))
        measured, predicted = (statistics.median(values) for values in zip(*runs))
        cells.append(Cell(c.model, c.link, c.workers, c.method, measured, predicted, runs))
    return cells


def judge(cells: list[Cell]) -> list[str]:
    """The figures of the grid, apart where there are more ranks than cores."""
    lines = []
    cores = os.cpu_count() or 1
    for words, group in (
        ("no more ranks than cores", [c for c in cells if c.workers <= cores]),
        ("more ranks than cores", [c for c in cells if c.workers > cores]),
    ):
        if group:
            errors = sorted(abs(c.error) for c in group)
            lines.append(f"{words}: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    networks = sorted({(c.model, c.link, c.workers) for c in cells})
    right = 0
    for network in networks:
        here = [c for c in cells if (c.model, c.link, c.workers) == network]
        first = min(here, key=lambda c: c.predicted)
        right += first.measured <= 1.05 * min(c.measured for c in here)
    lines.append(f"the method ranked first is within 5 % of the fastest in {right} of {len(networks)} networks")
    return lines


def load() -> list[Cell]:
    kept = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else []
    return [Cell(**cell) for cell in kept]


def save(cells: list[Cell]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"summary": judge(cells), "cells": [asdict(c) for c in cells]}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--links", default="100mbit,1gbit,unlimited")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    cells = load()
    links, workers = options.links.split(","), [int(text) for text in options.workers.split(",")]
    networks = [] if options.show else [*itertools.product(options.models.split(","), workers, links)]
    for repeat, (model, number, link) in itertools.product(range(options.repeats), networks):
        here = [c for c in cells if (c.model, c.link, c.workers) == (model, link, number)]
        others = [c for c in cells if c not in here]
        fresh = measure(model, link, number, options.rounds, options.steps)
        cells = others + merged(here if repeat else [], fresh)
        save(cells)
    table = Table("model", "workers", "link", "method", "measured", "predicted", "error")
    for c in sorted(cells, key=lambda c: (c.model, c.workers, c.link)):
        name = c.model.split(":")[0]
        figures = (f"{c.measured:.3f} s", f"{c.predicted:.3f} s", f"{c.error:+.0%}")
        table.add_row(name, str(c.workers), c.link, c.method, *figures)
    Console().print(table)
    print("\n".join(judge(cells)))


if __name__ == "__main__":
    main()
