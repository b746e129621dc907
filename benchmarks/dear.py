"""When does the decoupled schedule pay? ``python benchmarks/dear.py --links 500mbit,1gbit,2gbit``

Steps over c = exchange / compute, which follows from the link: S-SGD without fusion (wait-free backpropagation), fused,
and by MG-WFBP's rule; DeAR without fusion, in 25 MiB, as it comes, and tuned; ACP decoupled; beside them DDP. Prints
for each link the steps, what the simulator predicts from network and model as measured just before, and where a step
waited (backward: reduce-scatter and guard; forward: all-gather); writes ``benchmarks/results/dear.json`` after every
link. What was not rerun stays in the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import in_lab
from thinwire.tools import lab
from thinwire.tools.bench.contenders import dense_ring_bytes

RESULTS = Path(__file__).parent / "results" / "dear.json"
METHODS = (
    "ddp,ssgd:fusion=none,ssgd,ssgd:fusion=mgwfbp,"
    "dear:fusion=none,dear:fusion=25,dear,dear:fusion=tune,acp:rank=4:decoupled=true"
)


def measure(options: argparse.Namespace, link: str) -> dict[str, Any]:
    """One link: every row's step, prediction and waits."""
    result = in_lab.run(
        options.model, METHODS, options.workers, link, steps=options.steps, rounds=options.rounds, predict=True
    )
    ring = dense_ring_bytes(result.gradient_bytes, options.workers)
    return {
        "model": options.model,
        "workers": options.workers,
        "link": link,
        "compute": result.compute_seconds,
        "exchange": ring * 8 / lab.parse_rate(link),
        "floor": result.floor_seconds,
        "rows": [
            {
                "method": row.label,
                "seconds": row.step_seconds,
                "spread": row.spread_seconds,
                "predicted": row.predicted_seconds,
                "waited_backward": row.waited_backward_seconds,
                "waited_forward": row.waited_forward_seconds,
                "error": row.error,
            }
            for row in result.rows
            if row.label != "compute"
        ],
    }


def show(found: dict[str, Any]) -> None:
    c = found["exchange"] / found["compute"]
    title = f"{found['model']}, {found['workers']} workers, {found['link']}: c = {c:.2f}, floor of a coupled method "
    table = Table(
        "method", "step", "predicted", "x ddp", "waited backward", "forward", title=title + _ms(found["floor"])
    )
    ddp = next(row["seconds"] for row in found["rows"] if row["method"] == "ddp")
    for row in found["rows"]:
        if row["error"]:
            table.add_row(row["method"], row["error"])
            continue
        waits = (_ms(row["waited_backward"]), _ms(row["waited_forward"]))
        table.add_row(row["method"], _ms(row["seconds"]), _ms(row["predicted"]), f"{row['seconds'] / ddp:.2f}", *waits)
    Console().print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="chargpt:batch=4")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--links", default="250mbit,500mbit,1gbit,2gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    for link in options.links.split(","):
        fresh = measure(options, link)
        show(fresh)
        in_lab.keep(RESULTS, fresh)


if __name__ == "__main__":
    main()
