"""What ranks of the lab run for a paper: ``python -m thinwire.systems.papers.ranks PROGRAM ARGUMENTS``."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.core.events import tell_event
from thinwire.systems.kfac import KFAC, Variant
from thinwire.systems.kfac.planning import measured_costs
from thinwire.tools.bench.models.registry import build_model

SCHEDULES = {
    "D-KFAC": Variant("dkfac"),
    "MPD-KFAC": Variant("mpd"),
    "SPD-KFAC": Variant("spd", "spd", "threshold:1400", "d", "broadcast"),
    "our rules": Variant("spd"),
    "KAISA, one half": Variant("kaisa:1/2"),
}
"""SPD-KFAC as published, and by what is cheapest."""


def kfac(model: str, rounds: int, steps: int = 4, warmup: int = 4) -> None:
    """Time steps of all schedules in turns, with new statistics and inverses on every step; tells their medians."""
    costs, seconds = None, {row: list[float]() for row in SCHEDULES}
    for turn in range(rounds):
        for row, variant in SCHEDULES.items():
            work, rank = build_model(model), dist.get_rank()
            optimizer = torch.optim.SGD(work.model.parameters(), 0.01, momentum=0.9)
            with tw.attach(work.model, optimizer) as sync:
                second = KFAC(work.model, sync, damping=0.03, factor_update_steps=1, inv_update_steps=1,
                              variant=replace(variant, costs=costs))  # fmt: skip
                costs = costs or measured_costs(sync, second.plan.layers, "inverse")
                for step in range(warmup + steps):
                    if step == warmup:  # the messages have been planned again
                        dist.barrier()
                        began = time.perf_counter()
                    work.loss(work.model, step, rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                dist.barrier()
                seconds[row].append((time.perf_counter() - began) / steps)
            if rank == 0:
                tell_event({"now": f"round {turn + 1}, {row}: {seconds[row][-1]:.3f} s a step"})
    tell_event({row: statistics.median(found) for row, found in seconds.items()})


PROGRAMS = {"kfac": kfac}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    dist.destroy_process_group()
