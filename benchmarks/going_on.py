"""Under torchft: what a step costs, and how far training comes while replicas die.

``python benchmarks/going_on.py [--link 100mbit] [--only steps|deaths]``. The rows are modes of
``examples/going_on/train.py``, each in runs of its own, in turns: thinwire's methods by its adapter, beside ``attach``
and what torchft has itself. A step is that of two replicas without faults; in the second part each of three replicas
dies once and comes again. Writes ``benchmarks/results/going_on.json``. 7 minutes for the steps, 16 for the deaths.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from in_lab import told
from thinwire.tools import lab

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "going_on" / "train.py"
RESULTS = ROOT / "benchmarks" / "results" / "going_on.json"
WARM_UP = 20  # steps
RANKS = {"ddp": 2, "attach-ssgd": 2, "attach-acp": 2, "torchft-ddp": 3, "ssgd": 3, "acp": 3}  # one is the lighthouse
SIZE = ("768", "512")  # 0.65 M parameters, a batch of 512
SECONDS = 22.0  # of a run, imports included
SURVIVORS = ("torchft-allreduce", "ssgd", "torchft-diloco", "local", "acp")
DEATHS = {2: 0.3, 1: 0.5, 3: 0.7}  # rank and when, in parts of a run
LIFE_SECONDS = 60.0  # of a run with deaths


def rows_told(
    mode: str, ranks: int, link: str, seconds: float, size: Sequence[str] = (), faults: Sequence[lab.RankFault] = ()
) -> list[tuple[int, float, dict[str, Any]]]:
    """What the script tells every tenth step."""
    command = [str(SCRIPT), mode, *size]
    quiet = {"RUST_LOG": "error"}
    return told(command, ranks, link, seconds, may_end=False, grace_seconds=10.0, env=quiet, faults=faults)


def step_seconds(mode: str, link: str) -> float:
    """Median on the last rank."""
    rows = rows_told(mode, RANKS[mode], link, SECONDS, SIZE)
    mine = [(at, row["step"]) for rank, at, row in rows if rank == RANKS[mode] - 1 and row["replicas"] == 2]
    mine = [row for row in mine if row[1] >= WARM_UP]  # and who came first may have been alone
    if len(mine) < 2:
        sys.exit(f"{mode} made too few steps in {SECONDS:g} s")
    return statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(mine))


def life(mode: str, link: str) -> tuple[float, float]:
    """The last step that anybody told, and its loss."""
    faults = [lab.RankFault("kill", rank, at * LIFE_SECONDS, 0.03 * LIFE_SECONDS) for rank, at in DEATHS.items()]
    rows = rows_told(mode, len(DEATHS) + 1, link, LIFE_SECONDS, faults=faults)
    if not rows or max(at for _, at, _ in rows) < 0.9 * LIFE_SECONDS:
        sys.exit(f"{mode} did not go on to the end")
    _, _, row = max(rows, key=lambda one: one[2]["step"])
    return row["step"], row["loss"]


def steps(link: str, rounds: int) -> dict[str, float]:
    runs = [{mode: step_seconds(mode, link) for mode in RANKS} for _ in range(rounds)]
    median = {mode: statistics.median(run[mode] for run in runs) for mode in RANKS}
    table = Table("row", "ms a step", title=f"two replicas, {link}")
    for mode, seconds in median.items():
        table.add_row(mode, f"{1e3 * seconds:.1f}")
    Console().print(table)
    return median


def deaths(link: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    runs = [{mode: life(mode, link) for mode in SURVIVORS} for _ in range(rounds)]
    found = {mode: {"steps": [r[mode][0] for r in runs], "loss": [r[mode][1] for r in runs]} for mode in SURVIVORS}
    table = Table("row", "steps", "loss", title=f"three replicas, {link}, {LIFE_SECONDS:g} s, each dies once")
    for mode, one in found.items():
        table.add_row(mode, f"{statistics.median(one['steps']):.0f}", f"{statistics.median(one['loss']):.3f}")
    Console().print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("steps", "deaths"))
    options = parser.parse_args()
    record = json.loads(RESULTS.read_text()) if options.only else {}
    for part, measure in (("steps", steps), ("deaths", deaths)):
        if options.only in (None, part):
            load = round(os.getloadavg()[0], 1)
            record |= {"link": options.link, "load_average": load, part: measure(options.link, options.rounds)}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
