"""What fusion is worth: ``python benchmarks/merge_plans.py --models chargpt,resnet18 --links 1gbit``

S-SGD layer by layer, in 4 and 25 MiB, in one bucket, by the published rule (MG-WFBP) and by the exact optimum: each
measured in the lab beside what the simulator says, and beside DDP with its best bucket size. Prints a table a network
and writes ``benchmarks/results/merge_plans.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

import in_lab
from thinwire.tools.bench.summary import bench_table

RESULTS = Path(__file__).parent / "results" / "merge_plans.json"
RULES = ("none", "4", "25", "single", "mgwfbp", "optimal")
METHODS = ",".join(["ddp", "ddp-best", *(f"ssgd:fusion={rule}" for rule in RULES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="chargpt,resnet18")
    parser.add_argument("--links", default="1gbit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = []
    for model in options.models.split(","):
        for link in options.links.split(","):
            limit = None if link == "unlimited" else link
            result = in_lab.run(
                model, METHODS, options.workers, limit, steps=options.steps, rounds=options.rounds, predict=True
            )
            Console().print(bench_table(result))
            found += [
                {
                    "model": model,
                    "link": link,
                    "workers": options.workers,
                    "row": row.label,
                    "measured": row.step_seconds,
                    "predicted": row.predicted_seconds,
                    "error": row.error,
                }
                for row in result.rows
            ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
