"""A slower machine among equal ones: what a step takes with each method. ``python benchmarks/slow_rank.py``

Rank 1 sleeps in every step for 3/7 of the time that a forward and backward pass took it at the start: it has some 70 %
of the other's speed. A character GPT of 3.3 M parameters, two ranks. Seconds are measured, so run it alone. Writes
``benchmarks/results/slow_rank.json``.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from in_lab import keep, run
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.workload import Workload

RESULTS = Path(__file__).parent / "results" / "slow_rank.json"
MODEL, WORKERS, SLOW = "chargpt:layers=6:width=208:heads=4", 2, 1
LINKS, SPEEDS = ("100mbit", "1gbit"), (1.0, 0.7)
METHODS = (
    "ddp, ssgd, cast:dtype=int8, powersgd:rank=4, local:sync_every=8:codec=int8, "
    "local:sync_every=8:codec=int8:fragment_sync_delay=3, local:sync_every=16:codec=int2"
)


def build(speed: float = 1.0) -> Workload:
    """The model, on whose slow rank a step takes 1 / ``speed`` times as long; the bench calls this in every rank."""
    workload = build_model(MODEL)
    sleep = (1 / speed - 1) * min(_seconds_of_a_step(workload) for _ in range(3))

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        if rank == SLOW:
            time.sleep(sleep)
        return workload.loss(model, step, rank)

    return replace(workload, loss=loss)


def _seconds_of_a_step(workload: Workload) -> float:
    start = time.perf_counter()
    workload.loss(workload.model, 0, 0).backward()
    workload.model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=LINKS)
    told = parser.parse_args()
    os.chdir(Path(__file__).parent)  # the ranks import this file from here
    for link in told.links:
        load, seconds = round(os.getloadavg()[0], 1), {}
        for speed in SPEEDS:
            found = run(f"slow_rank:build:speed={speed}", METHODS, WORKERS, link, steps=16, rounds=3, warmup=16)
            seconds[str(speed)] = {row.label: row.step_seconds for row in found.rows}
        made = {"model": MODEL, "workers": WORKERS, "link": link, "load_before": load, "seconds": seconds}
        keep(RESULTS, made)


if __name__ == "__main__":
    main()
