"""Measure what is not measured yet: ``python run.py [--links 100mbit] [--workers 2] [--groups torch] [--again]``.

A run is one group of rows on one link with so many workers: all rows on the same ranks, in turns, until each reached
the loss or made the most steps. Every run is written to ``benchmarks/results/peers.json`` as it ends, so a cut
measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import store
import torch
from catalogue import INSTALLED, LINKS, SIZES, WORKERS, Size

from thinwire.tools import lab
from thinwire.tools.bench.rows import COMPUTE
from thinwire.tools.bench.session import BenchError, BenchSpec, RowRecord, run_session, seconds_to
from thinwire.tools.bench.summary import summarise


def measure(size: Size, link: str, workers: int, name: str, seconds: float) -> dict[str, Any]:
    """One run, as JSON."""
    group = size.groups[name]
    spec = BenchSpec(
        size.model,
        group.rows,
        workers,
        link,
        lab.parse_rate(link),
        steps=size.most_steps,
        rounds=5,
        every=group.every,
        target=size.target,
        operation_seconds=60.0,
        timeout_seconds=seconds,
    )

    def say(event: dict[str, Any]) -> None:
        if "error" in event:
            print(f"    {event['row']} failed: {event['error']}", flush=True)

    launch = functools.partial(lab.run, lab.Cluster.parse(workers, 1, link, None))
    load = round(os.getloadavg()[0], 1)
    record, launched = run_session(spec, launch, say)
    result = summarise(spec, record, emulated=launched.emulated, note=launched.note)
    ddp = next(row for row in record.rows if row.label == "ddp")
    rows = [_row(row, ddp, group.every, size.target) for row in record.rows]
    return {
        "describe": result.describe,
        "parameters": result.parameters,
        "gradient_bytes": result.gradient_bytes,
        "emulated": launched.emulated,
        "note": launched.note,
        "load_before": load,
        "every": group.every,
        "floor_seconds": result.floor_seconds,
        "rows": rows,
    }


def step_of(row: RowRecord, every: int) -> float | None:
    """Seconds a step: the median over turns of a turn's mean, since who averages now and then is slow now and then."""
    turns = [row.step_seconds[i : i + every] for i in range(0, len(row.step_seconds), every)]
    whole = [sum(turn) / every for turn in turns if len(turn) == every]
    return statistics.median(whole) if whole else None


def _row(row: RowRecord, ddp: RowRecord, every: int, target: float) -> dict[str, Any]:
    step, baseline = step_of(row, every), step_of(ddp, every)
    reached, reference = seconds_to(row.curve, target), seconds_to(ddp.curve, target)
    trains = row.kind != COMPUTE
    return {
        "label": row.label,
        "kind": row.kind,
        "error": row.error,
        "step_seconds": step,
        "step_ratio": step / baseline if step and baseline else None,
        "bytes_per_step": row.wire_bytes,
        "bytes_source": row.wire_source,
        "steps": len(row.losses),
        "train_seconds": row.untimed_seconds + sum(row.step_seconds),
        "target_seconds": None if row.error else reached,
        "target_ratio": reached / reference if trains and reached and reference and not row.error else None,
        "last_loss": row.curve[-1].validation if row.curve else None,
        "curve": [[p.step, round(p.seconds, 4), p.validation] for p in row.curve if _finite(p.validation)],
    }


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=LINKS, help=f"such as {' '.join(LINKS)}")
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    names = list(next(iter(SIZES.values())).groups)
    parser.add_argument("--groups", nargs="+", default=names, choices=names)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    parser.add_argument("--seconds", type=float, default=1800.0, help="when a run is ended")
    options = parser.parse_args()
    os.chdir(Path(__file__).parent)  # the ranks import contenders/ from here
    failed = 0
    for key in itertools.product(options.sizes, options.links, options.workers, options.groups):
        failed += not _once(*key, again=options.again, seconds=options.seconds)
    sys.exit(1 if failed else 0)


def _once(size: str, link: str, workers: int, name: str, *, again: bool, seconds: float) -> bool:
    """Measure and store a run unless it is there; whether it is there now."""
    key = {"size": size, "link": link, "workers": workers, "group": name}
    results, setting = store.read(), SIZES[size].setting
    if (old := results["settings"].get(size, setting)) != setting:
        sys.exit(f"{store.RESULTS} was measured with {old}; remove it to measure with {setting}")
    old = [run for run in results["runs"] if {k: run[k] for k in key} == key]
    if old and not again:
        return True
    print(f"... {size}, {link}, {workers} workers: {name}", flush=True)
    try:
        run = measure(SIZES[size], link, workers, name, seconds)
    except BenchError as error:
        print(f"    the run failed: {error}", flush=True)
        return False
    results = store.read()
    results["settings"][size] = setting
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    results["versions"] = {name: importlib.metadata.version(name) for name in INSTALLED}
    results["runs"] = [other for other in results["runs"] if other not in old] + [{**key, **run}]
    sizes, groups = list(SIZES), list(SIZES[size].groups)
    results["runs"].sort(
        key=lambda r: (
            sizes.index(r["size"]),
            lab.parse_rate(r["link"]),
            r["workers"],
            groups.index(r["group"]),
        )
    )
    store.write(results)
    return True


if __name__ == "__main__":
    main()
