"""Which rate for which scheme? ``python benchmarks/parameter_server_rates.py --out rates.json`` (most of an hour)

The same four nodes as in ``parameter_server.py``, one of them four times slower, in virtual time: the same state
machines and the gradients of the same model, but no waiting, so that every scheme can be given every rate of one grid,
with and without momentum, and several seeds. A run of virtual seconds is the same on any machine.

The synchronous row is ``bsp`` over links without limits: the weights of an all-reduce, in steps of the slowest node. A
run that is in the file already is not made again; ``--minutes`` ends the program in between.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.systems.cli.ps_work import rank_of, read_outer
from thinwire.systems.parameter_server import Layout, Link, preset, simulate
from thinwire.tools.bench.models.registry import build_model

MODEL = "chargpt:layers=2:width=128:heads=4:batch=4"
SYNCHRONOUS = "S-SGD"
SCHEMES = {
    SYNCHRONOUS: "bsp",
    "asp": "asp",
    "inhad S=4, c=2": "inhad:max_staleness=4:update_every=nodes/2",
    "inhad S=4, c=4": "inhad:max_staleness=4:update_every=nodes",
    "inhad S=4, c=1": "inhad:max_staleness=4:update_every=nodes/4",
    "inhad S=8, c=2": "inhad:max_staleness=8:update_every=nodes/2",
    "inhad S=8, c=1": "inhad:max_staleness=8:update_every=nodes/4",
    "inhad S=8, c=3": "inhad:max_staleness=8:update_every=3 nodes",
    "inhad S=4, c=2, no scaling": "inhad:max_staleness=4:update_every=nodes/2:alpha=none",
    "inhad S=4, c=2, 1/(1+age)": "inhad:max_staleness=4:update_every=nodes/2:alpha=reciprocal",
}
OPTIMIZERS = {
    "AdamW": "adamw",
    "AdamW, momentum 0": "adamw:beta1=0.0",
    "SGD, momentum 0.9": "sgd:momentum=0.9",
    "SGD": "sgd",
}
RATES = {"adamw": (2.5e-4, 5e-4, 1e-3, 2e-3), "sgd": (0.0125, 0.025, 0.05, 0.1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(str(i) for i in range(len(SCHEMES))), help="numbers of rows")
    parser.add_argument("--optimizers", default="0,1,2,3", help="numbers")
    parser.add_argument("--rates", help="instead of the grid, as 1e-3,2e-3")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds of training")
    parser.add_argument("--pace", type=float, default=0.25, help="seconds of a step")
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--link", type=float, default=1e9, help="bits per second of every card")
    parser.add_argument("--target", type=float, default=2.8, help="held-out loss to reach")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, which gains the runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    for key in list(grid(options)):
        if key in known:
            continue
        if time.monotonic() > end:
            print("... time is up; the same command goes on", file=sys.stderr)
            break
        known[key] = train(key, options)
        print(f"{key}: {known[key]['losses'][-1][2]:.3f}", file=sys.stderr, flush=True)
        options.out.write_text(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in known.items()) + "\n}\n"
        )
    show(known, options)


def grid(options: argparse.Namespace) -> Iterator[str]:
    """scheme | optimizer | rate | seed."""
    schemes = [list(SCHEMES)[int(i)] for i in options.schemes.split(",")]
    optimizers = [list(OPTIMIZERS)[int(i)] for i in options.optimizers.split(",")]
    for seed, scheme, optimizer in itertools.product(range(options.seeds), schemes, optimizers):
        rates = RATES["adamw" if "AdamW" in optimizer else "sgd"]
        if options.rates:
            rates = tuple(float(x) for x in options.rates.split(","))
        for rate in rates:
            yield f"{scheme} | {optimizer} | {rate:g} | {seed}"


def train(key: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run: (seconds, gradients, held-out loss), once a virtual second."""
    scheme, optimizer, rate, seed = key.split(" | ")
    workload = build_model(options.model, int(seed))
    network, layout = workload.model, Layout.of(workload.model)

    def gradient(theta: Tensor, node: int, worker: int, step: int) -> Tensor:
        layout.write(theta, network)
        network.zero_grad()
        workload.loss(network, step, rank_of(node + 16 * int(seed), worker)).backward()
        return layout.gradient(network)

    def evaluate(theta: Tensor) -> float:
        layout.write(theta, network)
        loss = workload.held_out_loss()
        assert loss is not None
        return loss

    outer = read_outer(f"{OPTIMIZERS[optimizer]}:lr={rate}")
    link = Link() if scheme == SYNCHRONOUS else Link(0.0005, options.link)
    trace = simulate(
        replace(preset(SCHEMES[scheme]), start_nodes=4), nodes=4, seconds=options.seconds, outer=outer,
        step_seconds=lambda node, worker, step, rng: options.pace * (options.slow if node == 3 else 1.0),
        link=link, server_link=link, parameters=layout.flat(network), gradient=gradient, evaluate=evaluate,
    )  # fmt: skip
    times = [at for _, at, _ in trace.updates]
    counts = [0, *itertools.accumulate(len(rows) for _, _, rows in trace.updates)]
    ages = trace.staleness()
    return {
        "updates": len(trace.updates),
        "staleness": round(sum(age * n for age, n in ages.items()) / max(1, sum(ages.values())), 3),
        "losses": [[at, counts[bisect.bisect(times, at)], round(loss, 4)] for at, loss in trace.losses],
    }


def show(known: dict[str, Any], options: argparse.Namespace) -> None:
    """Per scheme and optimizer the rate with the least seconds to the target (then the least loss at the end)."""
    best: dict[tuple[str, str], tuple[float, float, str, dict[str, Any]]] = {}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for key, run in known.items():
        scheme, optimizer, rate, _ = key.split(" | ")
        groups.setdefault((scheme, optimizer, rate), []).append(run)
    for (scheme, optimizer, rate), runs in groups.items():
        reached = statistics.median(first(run, options.target) for run in runs)
        loss = statistics.median(run["losses"][-1][2] for run in runs)
        row = (reached, loss, rate, {"runs": runs})
        best[scheme, optimizer] = min(best.get((scheme, optimizer), row), row, key=lambda r: r[:2])
    table = Table(title=f"virtual time, one of 4 nodes {options.slow:g}x slower, the best rate of each")
    names = (
        "scheme",
        "optimizer",
        "rate",
        "seeds",
        "updates",
        "age",
        f"s to {options.target:g}",
        "gradients",
        "loss at end",
    )
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < 2 else "right")
    for (scheme, optimizer), (reached, loss, rate, more) in best.items():
        runs = more["runs"]
        used = statistics.median(next((n for _, n, x in r["losses"] if x <= options.target), 1e9) for r in runs)
        table.add_row(
            scheme, optimizer, rate, str(len(runs)), str(runs[0]["updates"]), f"{runs[0]['staleness']:.2f}",
            f"{reached:.0f}" if reached < 1e9 else "-", f"{used:.0f}" if used < 1e9 else "-", f"{loss:.3f}",
        )  # fmt: skip
    Console().print(table)


def first(run: dict[str, Any], target: float) -> float:
    """Seconds until the held-out loss is at the target for the first time."""
    return next((at for at, _, loss in run["losses"] if loss <= target), 1e9)


if __name__ == "__main__":
    main()
