"""Steps on long and lossy wires: of DDP, torch's PowerSGD hook and thinwire, two workers, in the lab.

``python benchmarks/long_wire.py [--wire 100mbit/25ms/0.1%/cubic ...]`` writes ``results/long_wire.json``: seconds per
step, the median of three turns. The delay is one way; ``cubic`` is what most systems run, and what DDP gets too; "ask"
leaves it to thinwire to ask for BBR, which this system then allows.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.tools import lab
from thinwire.tools.bench.race_losses import step_times
from thinwire.tools.bench.rows import COMPUTE, parse_rows
from thinwire.tools.bench.session import BenchSpec, run_session

RESULTS = Path(__file__).parent / "results" / "long_wire.json"
MODEL = "chargpt:layers=4:width=144:heads=4:batch=4"
ROWS = (
    "ddp,torch-powersgd:rank=4,ssgd,cast:dtype=int4,powersgd:rank=4,acp:rank=4,local:sync_every=8:codec=int2,"
    "local:sync_every=8:codec=int2:fragment_sync_delay=3,local:sync_every=8:codec=int1"
)
WIRES = (
    "100mbit/0ms/0%/cubic",
    "100mbit/25ms/0%/cubic",
    "100mbit/25ms/0.1%/cubic",
    "100mbit/25ms/0.1%/ask",
    "100mbit/25ms/1%/cubic",
)
TURN, TURNS = 8, 3
WORST, ITS_ROWS, ITS_TURN = "1%", "ddp,ssgd,cast:dtype=int4,local:sync_every=8:codec=int2", 3
"""A loss at which DDP's step takes a quarter of a minute: fewer rows, and shorter turns."""


def measure(wire: str) -> dict[str, Any]:
    """Seconds per step of every row over one wire."""
    link, delay, loss, control = wire.split("/")
    cluster = lab.Cluster.parse(2, 1, link, delay, loss=loss, congestion=None if control == "ask" else control)
    text, turn = (ITS_ROWS, ITS_TURN) if loss == WORST else (ROWS, TURN)
    spec = BenchSpec(
        MODEL, parse_rows(text), 2, link, lab.parse_rate(link), steps=turn, rounds=TURNS, timeout_seconds=3600.0
    )
    load = round(os.getloadavg()[0], 1)
    record, launched = run_session(spec, functools.partial(lab.run, cluster))
    compute = next(row for row in record.rows if row.kind == COMPUTE)
    rows = {row.label: asdict(step_times(row, TURNS, compute)) for row in record.rows if row is not compute}
    return {"wire": wire, "note": launched.note, "load_before": load, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", nargs="+", default=list(WIRES), help="RATE/DELAY/LOSS/cubic or RATE/DELAY/LOSS/ask")
    told = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for wire in told.wire:
        print("...", wire, file=sys.stderr, flush=True)
        found = measure(wire)
        known = [one for one in known if one["wire"] != wire] + [found]
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        ddp = found["rows"]["ddp"]["seconds"]
        for label, row in found["rows"].items():
            print(f"{wire:26} {label:52} {row['seconds']:.3f} s, {row['seconds'] / ddp:.2f} of DDP's")


if __name__ == "__main__":
    main()
