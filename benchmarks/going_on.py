"""What a step costs under torchft: thinwire's methods by its adapter, beside ``attach`` and torchft's own DDP.

``python benchmarks/going_on.py [--link 100mbit]``. The rows are modes of ``examples/going_on/train.py``, two replicas
without faults, each row in runs of its own, in turns. Writes ``benchmarks/results/going_on.json``. About 7 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire import lab

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "going_on" / "train.py"
RESULTS = ROOT / "benchmarks" / "results" / "going_on.json"
WARM_UP = 20  # steps
RANKS = {"ddp": 2, "attach-ssgd": 2, "attach-acp": 2, "torchft-ddp": 3, "ssgd": 3, "acp": 3}  # one is the lighthouse
SIZE = ("768", "512")  # 0.65 M parameters, a batch of 512
SECONDS = 22.0  # of a run, imports included


def step_seconds(mode: str, link: str) -> float:
    """Median over what the script tells every tenth step, on the last rank."""
    last, told, began = RANKS[mode] - 1, [], time.monotonic()

    def on_line(rank: int, line: str) -> None:
        if rank == last and line.startswith("{"):
            row = json.loads(line)
            told.append((time.monotonic() - began, row["step"], row["replicas"]))

    print(f"... {mode}", file=sys.stderr, flush=True)
    lab.run(
        lab.Cluster.parse(RANKS[mode], link=link), [sys.executable, str(SCRIPT), mode, *SIZE], on_line=on_line,
        timeout_seconds=SECONDS, grace_seconds=10.0, env={"RUST_LOG": "error"},
    )  # fmt: skip
    mine = [row for row in told if row[1] >= WARM_UP and row[2] == 2]  # who came first may have been alone
    if len(mine) < 2:
        sys.exit(f"{mode} made too few steps in {SECONDS:g} s")
    return statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(mine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    times: dict[str, list[float]] = {mode: [] for mode in RANKS}
    for _ in range(options.rounds):
        for mode in RANKS:
            times[mode].append(step_seconds(mode, options.link))
    steps = {mode: statistics.median(mine) for mode, mine in times.items()}
    table = Table("row", "ms a step", title=f"two replicas, {options.link}")
    for mode, seconds in steps.items():
        table.add_row(mode, f"{1e3 * seconds:.1f}")
    Console().print(table)
    record = {"link": options.link, "load_average": load, "steps": steps}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
