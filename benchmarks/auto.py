"""Is ``method="auto"`` ever slower than the best fixed exact method? ``python benchmarks/auto.py --workers 2``

On each network of the grid: S-SGD in several bucket sizes, and "auto", which measures, plans and switches by itself
(its row is timed after it has settled). Prints auto / best, with the spread of the best beside it, and writes
``benchmarks/results/auto.json`` after every network; what was not rerun stays in the file.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import in_lab
from main_figures import measure, seconds

RESULTS = Path(__file__).parent / "results" / "auto.json"
FIXED = ("ssgd", "ssgd fusion=1.0", "ssgd fusion=25.0")
ALLOWED = 1.03


def compare(model: str, workers: int, link: str, rounds: int) -> dict[str, Any]:
    limit = None if link == "unlimited" else link
    methods = "ssgd,ssgd:fusion=1.0,ssgd:fusion=25.0,auto"
    result = measure(model, methods, workers=workers, link=limit, steps=6, rounds=rounds)
    times = {label: seconds(result, label) for label in (*FIXED, "auto")}
    best = min(FIXED, key=times.__getitem__)
    spread = (result.row(best).spread_seconds or 0.0) / times[best]
    return {
        "model": model,
        "workers": workers,
        "link": link,
        "best": best,
        "seconds": times,
        "ratio": times["auto"] / times[best],
        "spread": spread,
        "met": times["auto"] <= times[best] * max(ALLOWED, 1 + spread),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="chargpt,mlp:width=1024:layers=8:batch=64")
    parser.add_argument("--links", default="100mbit,1gbit,unlimited")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model, link in itertools.product(options.models.split(","), options.links.split(",")):
        rows = in_lab.keep(RESULTS, compare(model, options.workers, link, options.rounds))
    table = Table("workers", "model", "link", "best fixed", "auto / best", "spread of best", "met")
    for row in rows:
        name, met = row["model"].split(":")[0], "yes" if row["met"] else "NO"
        figures = (f"{row['ratio']:.3f}", f"{row['spread']:.1%}", met)
        table.add_row(str(row["workers"]), name, row["link"], row["best"], *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
