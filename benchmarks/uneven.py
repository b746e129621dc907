"""Two machines of half the speed beside two fast ones: what local steps at their own pace are worth.

``python benchmarks/uneven.py`` trains a character GPT of 0.39 M parameters by local steps (every 4 in 2 bits) on an
emulated 100 Mb/s: four in step with the slow ones, four at their own pace, the two fast ones alone, and four fast ones,
all for as many seconds. A rank sleeps in each step until the step has taken ``TICK`` seconds, or twice that on a slow
one; the schedule of the learning rate spans the run. Writes ``benchmarks/results/uneven.json``. A quarter of an hour;
run it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire as tw
from in_lab import told
from thinwire.tools.bench.models.registry import build_model

RESULTS = Path(__file__).parent / "results" / "uneven.json"
MODEL = "chargpt:layers=3:width=96:heads=3:lr=0.0056:beta2=0.95:decay=0.1:held_out=64:scaled_init=true"
LINK, TICK, TICKS, POINTS = "100mbit", 0.15, 1000, 25
SPEEDS = "1,1,0.5,0.5"
ROWS = {  # name -> speeds, and options
    "four in step": (SPEEDS, {}),
    "own pace": (SPEEDS, {"pace": "own"}),
    "own pace, look 0.5": (SPEEDS, {"pace": "own", "look": 0.5}),
    "the two fast ones alone": ("1,1", {}),
    "four fast ones": ("1,1,1,1", {}),
    "four fast ones, own pace": ("1,1,1,1", {"pace": "own"}),
}


def rank_of_job(name: str, seed: int) -> None:
    """Train on one rank, and print points: seconds and held-out loss of the outer weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    speeds, options = ROWS[name]
    rank, speed = dist.get_rank(), [float(one) for one in speeds.split(",")]
    ticks = TICKS if options.get("pace") else round(TICKS * min(speed))
    workload = build_model(MODEL, seed)
    model, optimizer = workload.model, workload.optimizer(workload.model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    sync = tw.attach(model, optimizer, "local", sync_every=4, codec="int2", **options)

    def rate(_: int) -> float:
        warm = 0.1
        done = sync.progress
        return done / warm if done < warm else 1 - 0.9 * (done - warm) / (1 - warm)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    begin, shown, made, late = time.monotonic(), -1, 0, 0.0
    for step in sync.steps(ticks):
        if sync.in_step and step * POINTS // ticks > shown and sync.in_step:
            shown, entered = step * POINTS // ticks, time.monotonic()
            with sync.outer_weights():
                loss = workload.held_out_loss()
            late += time.monotonic() - entered  # of the clock that is shown: evaluation is no training
            if rank == 0:
                print(json.dumps({"seconds": entered - begin - late, "step": step, "loss": loss}), flush=True)
        entered = time.monotonic()
        workload.loss(model, seed * TICKS + step, rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        made += 1
        time.sleep(max(0.0, entered + TICK / speed[rank] - time.monotonic()))
    sync.finish()
    done = {"seconds": time.monotonic() - begin - late, "step": ticks, "loss": workload.held_out_loss(), "made": made}
    print(json.dumps(done), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, help="train as a rank of this row")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.row:
        rank_of_job(asked.row, asked.seed)
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked.rows:
        workers = len(ROWS[name][0].split(","))
        print(f"... {name}: {TICK * TICKS:.0f} s and more", file=sys.stderr, flush=True)
        lines = told([sys.argv[0], "--row", name, "--seed", str(asked.seed)], workers, LINK, 3000.0)
        points = [(one["seconds"], one["loss"]) for rank, _, one in lines if rank == 0]
        made = {rank: one["made"] for rank, _, one in lines if "made" in one}
        known[name] = {"points": points, "steps": [made[rank] for rank in sorted(made)], "load": os.getloadavg()[0]}
        print(f"{name}: loss {points[-1][1]:.3f} after {points[-1][0]:.0f} s", flush=True)
        RESULTS.write_text(json.dumps({"model": MODEL, "link": LINK, "tick": TICK, **known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
