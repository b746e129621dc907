"""Does a hierarchy pay, and when does it not? ``python benchmarks/hierarchy.py``

In the lab: 4 nodes of 2 ranks, 100 Mbit/s for each node, no limit inside one; a small perceptron whose gradients are
all that matters. Flat and torus all-reduce, and HiTopK at densities below and above the break-even on bandwidth,
2 w / (m (w + 4)) = 0.25 for m = 4 nodes and w = 4 bytes. Of each row the measured step, what the simulator made of the
network and the model as measured just before, and the bytes that a node's interface sent. Prints a table and writes
``benchmarks/results/hierarchy.json``; ``--show`` prints the file as it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.tools import lab
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec, run_session
from thinwire.tools.bench.summary import summarise

RESULTS = Path(__file__).parent / "results" / "hierarchy.json"
WORKERS, RANKS, LINK = 8, 2, "100mbit"
NODES = WORKERS // RANKS
BREAK_EVEN = 2 * 4 / (NODES * (4 + 4))
DENSITIES = (0.01, 0.1, 0.2, 0.4)
MODEL = "mlp:width=384:layers=4:batch=8"
METHODS = "ssgd,ssgd:collective=three_phase,ssgd:collective=torus," + ",".join(f"hitopk:density={d}" for d in DENSITIES)


def across_bytes(label: str, size: int) -> float:
    """What a node's card sends in a step by the formulas, the few dense vectors beside the matrices left out."""
    if "density=" in label:
        return (NODES - 1) * 8 * float(label.split("density=")[1]) * size / 4
    return 2 * (WORKERS - 1) / WORKERS * size if label == "ssgd" else 2 * (NODES - 1) / NODES * size


def measure(rounds: int, steps: int) -> dict[str, object]:
    spec = BenchSpec(
        MODEL, parse_rows(METHODS), WORKERS, LINK, lab.parse_rate(LINK), steps, rounds, warmup=2, predict=True,
        ranks_per_node=RANKS, timeout_seconds=230.0,
    )  # fmt: skip
    record, launched = run_session(spec, functools.partial(lab.run, lab.Cluster.parse(WORKERS, RANKS, LINK, None)))
    result = summarise(spec, record, emulated=launched.emulated, note=launched.note)
    rows = [
        {
            "method": row.label,
            "measured_seconds": row.step_seconds,
            "predicted_seconds": row.predicted_seconds,
            "node_bytes": row.bytes_per_step,
            "formula_bytes": round(across_bytes(row.label, result.gradient_bytes)),
            "error": row.error,
        }
        for row in result.rows
        if row.label.startswith(("ssgd", "hitopk"))
    ]
    return {
        "describe": result.describe,
        "note": result.note,
        "cores": os.cpu_count(),
        "gradient_bytes": result.gradient_bytes,
        "compute_seconds": result.compute_seconds,
        "break_even_density": BREAK_EVEN,
        "rows": rows,
    }


def show(found: dict[str, object]) -> None:
    rows = found["rows"]
    assert isinstance(rows, list)
    table = Table()
    table.add_column("method", no_wrap=True)
    for title in ("measured", "predicted", "error", "MB a node sends", "by formula", "against torus"):
        table.add_column(title, justify="right")
    torus = next((row["measured_seconds"] for row in rows if "torus" in row["method"]), None)
    for row in rows:
        seconds, predicted = row["measured_seconds"], row["predicted_seconds"]
        if row["error"] or seconds is None:
            table.add_row(row["method"], f"failed: {row['error']}")
            continue
        off = f"{predicted / seconds - 1:+.0%}" if predicted else "-"
        table.add_row(
            row["method"],
            f"{seconds:.3f} s",
            f"{predicted:.3f} s" if predicted else "-",
            off,
            f"{row['node_bytes'] / 1e6:.2f}",
            f"{row['formula_bytes'] / 1e6:.2f}",
            f"{seconds / torus:.2f}" if torus else "-",
        )
    Console(width=120).print(table)
    print(
        f"{found['note']}; {found['cores']} cores; {found['describe']}; compute alone {found['compute_seconds']:.3f} s"
    )
    print(f"by bandwidth HiTopK beats the torus below a density of {found['break_even_density']:g}, and loses above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.show:
        found = measure(options.rounds, options.steps)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
