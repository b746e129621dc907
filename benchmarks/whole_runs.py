"""What a user gets: whole runs, from ``attach`` to the final weights, of methods that choose by themselves.

``python benchmarks/whole_runs.py``: 300 steps of a character GPT of 3.3 M parameters with ``"auto", lossy=True`` and
with the method that wins at 100 Mb/s, in turns; about 9 minutes. ``python benchmarks/whole_runs.py --link 2mbit
--methods compute,local --steps 296 --rounds 1``: ``"local"`` on a very thin link, and the same steps without any
exchange; about 3 minutes. The network is not remembered. Writes ``benchmarks/results/whole_runs.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from in_lab import keep, told
from thinwire.tools.bench.models.registry import build_model, loss_of
from thinwire.tools.bench.rows import parse_rows

RESULTS = Path(__file__).parent / "results" / "whole_runs.json"
MODEL = "chargpt:layers=6:width=208:heads=4"
ROWS = "powersgd:rank=4,auto:lossy=true"
LAST = 20  # steps, whose mean loss is told
COMPUTE = "compute"  # no exchange


def rank_main(text: str, steps: int) -> None:
    """Train, and tell seconds and loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = build_model(MODEL)
    loss, optimizer = loss_of(workload, dist.get_rank()), workload.optimizer(workload.model)
    losses = []
    dist.barrier()
    began = time.perf_counter()
    sync = None
    if text != COMPUTE:
        (row,) = parse_rows(text)
        sync = tw.attach(workload.model, optimizer, row.kind, **row.options)
    for step in range(steps):
        optimizer.zero_grad()
        now = loss(workload.model, step)
        now.backward()
        optimizer.step()
        losses.append(now.detach())
    trained = time.perf_counter() - began
    if isinstance(sync, tw.LocalSync):
        sync.finish()
    seconds = time.perf_counter() - began
    last = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(last)
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "trained": trained, "loss": float(last) / dist.get_world_size()}
        found |= {"method": COMPUTE, "note": ""} if sync is None else _said(sync)
        print(json.dumps(found), flush=True)
    dist.barrier()


def _said(sync: Any) -> dict[str, Any]:
    stats = sync.stats()
    return {"method": stats.method, "note": stats.note}


def run(text: str, workers: int, link: str, steps: int) -> dict[str, Any]:
    forgets = {"THINWIRE_REMEMBER": "0"}
    ((_, _, found),) = told([__file__, text, str(steps)], workers, link, 1200.0, env=forgets)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=ROWS)
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    texts = options.methods.split(",")
    rounds = [
        {text: run(text, options.workers, options.link, options.steps) for text in texts} for _ in range(options.rounds)
    ]
    rows = {text: [one[text] for one in rounds] for text in texts}
    for text, runs in rows.items():
        middle, loss = (statistics.median(one[key] for one in runs) for key in ("seconds", "loss"))
        print(f"{text:30} {middle:7.1f} s, loss {loss:.3f}, ended with {runs[-1]['method']} {runs[-1]['note']}")
    where = {"model": MODEL, "workers": options.workers, "link": options.link}
    keep(RESULTS, {**where, "steps": options.steps, "load_average": load, "rows": rows})


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 3 and sys.argv[2].isdigit() else main()
