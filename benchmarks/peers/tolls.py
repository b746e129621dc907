"""Tolls: ``python tolls.py [--train 2 4] [--time 2/100mbit ...]`` measures what is not in ``results/tolls.json`` yet.

The toll of a row is its seconds to DDP's loss, over those that DDP's steps take where nothing is exchanged. Losses per
step do not depend on the network, so rows are trained apart, on ranks that nothing slows down, each at the rate that
serves it best, on three seeds; seconds per step are measured on the links, in turns. Time to the loss is the product.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from catalogue import TOLL_MODEL, TOLL_NETWORKS, toll_rows, toll_timed, toll_trained, trained_as

from thinwire import lab
from thinwire.bench.finish import pace_of
from thinwire.bench.race import Track
from thinwire.bench.rows import COMPUTE
from thinwire.bench.session import run_session
from thinwire.bench.spec import BenchSpec

sys.path.append(str(Path(__file__).parents[1]))
from race import factors

RESULTS = Path(__file__).parents[1] / "results" / "tolls.json"
STEPS, SHARE = 320, 0.6  # of each row, and at which share of DDP's its loss is the target
RATES = {2: [0.25, 0.35, 0.5, 0.7, 1.0], 4: [0.35, 0.5, 0.7]}  # of 0.001: DDP takes none at the ends
TURN, TURNS = 16, 3  # steps, of which a row that averages now and then makes whole periods


def train(workers: int) -> dict[str, Any]:
    """Steps to DDP's loss of every row, over DDP's."""
    track = Track(TOLL_MODEL, workers, STEPS)
    found = factors(track, toll_trained(workers), SHARE, RATES[workers], [0])
    known = {label: {"rate": one.rate, "factors": one.factors} for label, one in found.items()}
    rows = {row.label: known[trained_as(row.label)] for row in toll_rows(workers)}
    return {"workers": workers, "steps": STEPS * SHARE, "rows": rows}


def clock(workers: int, link: str) -> dict[str, Any]:
    """Seconds per step of every row on one network."""
    rows = toll_timed(workers, link)
    spec = BenchSpec(TOLL_MODEL, rows, workers, link, lab.parse_rate(link), steps=TURN, rounds=TURNS,
                     operation_seconds=120.0, timeout_seconds=3600.0)  # fmt: skip
    load = round(os.getloadavg()[0], 1)
    record, launched = run_session(spec, functools.partial(lab.run, lab.Cluster.parse(workers, 1, link, None)))
    compute = next(row for row in record.rows if row.kind == COMPUTE)
    paces = {row.label: asdict(pace_of(row, TURNS, compute)) for row in record.rows if row is not compute}
    return {
        "workers": workers, "link": link, "emulated": launched.emulated, "note": launched.note, "load_before": load,
        "compute_seconds": statistics.median(compute.step_seconds), "paces": paces,
    }  # fmt: skip


def read() -> dict[str, Any]:
    """What was measured so far."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"trained": [], "clocked": []}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{workers}/{link}" for workers, link in TOLL_NETWORKS]
    parser.add_argument("--train", type=int, nargs="*", default=[2, 4], help="numbers of workers")
    parser.add_argument("--time", nargs="*", default=every, choices=every, help="networks")
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    told = parser.parse_args()
    os.chdir(Path(__file__).parent)  # the ranks import contenders/ from here
    asked: list[tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = []
    asked += [("trained", train, {"workers": workers}) for workers in told.train]
    for workers, link in (text.split("/") for text in told.time):
        asked.append(("clocked", clock, {"workers": int(workers), "link": link}))
    for kind, measure, key in asked:
        known = [one for one in read()[kind] if all(one[name] == value for name, value in key.items())]
        if known and not told.again:
            continue
        print("...", kind, *key.values(), file=sys.stderr, flush=True)
        made = measure(**key)
        results = read()
        results[kind] = [one for one in results[kind] if one not in known] + [made]
        results["clocked"].sort(key=lambda one: (one["workers"], lab.parse_rate(one["link"])))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
