"""Tolls: ``python tolls.py [--train 3.3M/2 ...] [--time 3.3M/2/100mbit ...]`` measures what is not recorded yet.

The toll of a row is its seconds to DDP's loss, over those that DDP's steps take where nothing is exchanged. Losses per
step do not depend on the network, so rows are trained apart, by ``../race.py``, on ranks that nothing slows down, each
at the rate that serves it best; seconds per step are measured on the links, in turns. Time to the loss is the product.
A link is a rate, or a rate, the delay one way and the share of packets that is lost.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from catalogue import AS_IT_COMES, TOLLS, trained_as

from thinwire.predict.choose.worth import rows_of, worth_from
from thinwire.tools import lab
from thinwire.tools.bench.race_losses import step_times
from thinwire.tools.bench.rows import COMPUTE, priced
from thinwire.tools.bench.session import BenchSpec, run_session

sys.path.append(str(Path(__file__).parents[1]))
from race import RECIPE, planned
from race import RESULTS as RACE

RESULTS = Path(__file__).parents[1] / "results" / "tolls.json"
TURN, TURNS = 16, 3  # steps, of which a row that averages now and then makes whole periods


def raced(name: str) -> Any:
    """Its whole runs, as ``../race.py`` recorded them."""
    asked = TOLLS[name]
    track = (f"{asked.model}:{RECIPE}", asked.workers, asked.steps)
    (found,) = (
        one
        for one in json.loads(RACE.read_text())
        if tuple(one["track"][key] for key in ("model", "workers", "steps")) == track
    )
    return found


def train(name: str) -> dict[str, Any]:
    """Steps to DDP's loss of every row, over DDP's."""
    asked, known = TOLLS[name], raced(name)["rows"]
    rows = {row.label: known[trained_as(row.label)] for row in asked.trained}
    told = {label: {key: row[key] for key in ("rate", "factors")} for label, row in rows.items()}
    return {"name": name, "steps": asked.steps, "rows": told}


def is_whole(kind: str, one: dict[str, Any]) -> bool:
    """Whether all rows that are asked for now are in it."""
    asked = TOLLS[one["name"]]
    if kind == "clocked":
        return all(row.label in one["paces"] for row in asked.timed(one["link"]))
    return all(row.label in one["rows"] for row in asked.trained)


def clock(name: str, link: str) -> dict[str, Any]:
    """Seconds per step of every row on one network."""
    asked = TOLLS[name]
    workers = asked.workers
    rate, delay, loss = (*link.split(), None, None)[:3]
    spec = BenchSpec(asked.model, asked.timed(link), workers, rate, lab.parse_rate(rate), steps=TURN, rounds=TURNS,
                     operation_seconds=300.0, timeout_seconds=3600.0)  # fmt: skip
    load = round(os.getloadavg()[0], 1)
    long = {"loss": loss, "congestion": "cubic"} if delay else {}  # what most systems run
    record, launched = run_session(spec, functools.partial(lab.run, lab.Cluster.parse(workers, 1, rate, delay, **long)))
    compute = next(row for row in record.rows if row.kind == COMPUTE)
    paces = {row.label: asdict(step_times(row, TURNS, compute)) for row in record.rows if row is not compute}
    chosen = {row.label: chosen_steps(row.plan, name) for row in record.rows if row.label == AS_IT_COMES[0].label}
    return {
        "name": name, "link": link, "emulated": launched.emulated, "note": launched.note, "load_before": load,
        "compute_seconds": statistics.median(compute.step_seconds), "paces": paces, "chosen": chosen,
    }  # fmt: skip


def chosen_steps(plan: str, name: str) -> dict[str, Any]:
    """What ``"local"`` chose on a link, and the steps factor that the planner has for it by this model's rows."""
    found, method = raced(name), priced(replace(AS_IT_COMES[0], plan=plan))
    assert method is not None
    worth_of = worth_from(rows_of({"rows": planned(found)}))
    worth = worth_of(method, found["elements"], found["track"]["workers"])
    return {"plan": plan, "rate": 1.0, "factors": [worth.low, worth.middle, worth.high]}


def read() -> dict[str, Any]:
    """What was measured so far."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"trained": [], "clocked": []}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{name}/{link}" for name, asked in TOLLS.items() for link in asked.links]
    parser.add_argument("--train", nargs="*", default=list(TOLLS), choices=TOLLS, help="sizes and numbers of workers")
    parser.add_argument("--time", nargs="*", default=every, choices=every, help="those, and networks")
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    told = parser.parse_args()
    os.chdir(Path(__file__).parent)  # the ranks import contenders/ from here
    asked: list[tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = []
    asked += [("trained", train, {"name": name}) for name in told.train]
    for name, _, link in (text.rpartition("/") for text in told.time):
        asked.append(("clocked", clock, {"name": name, "link": link}))
    for kind, measure, key in asked:
        known = [one for one in read()[kind] if all(one[name] == value for name, value in key.items())]
        if any(is_whole(kind, one) for one in known) and not told.again:  # at most one has this key
            continue
        print("...", kind, *key.values(), file=sys.stderr, flush=True)
        made = measure(**key)
        results = read()
        results[kind] = [one for one in results[kind] if one not in known] + [made]
        order = list(TOLLS)
        results["clocked"].sort(
            key=lambda one: (order.index(one["name"]), lab.parse_rate(one["link"].split()[0]), len(one["link"]))
        )
        results["trained"].sort(key=lambda one: order.index(one["name"]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
