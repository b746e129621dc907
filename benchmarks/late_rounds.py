"""How much of what sets ranks apart to take out when an exchange comes back late: steps to plain averaging's loss.

``python benchmarks/late_rounds.py``: local steps in 8 bits, two ranks in one process, a character GPT of 1.1 M
parameters and AdamW, three seeds; each delay with nothing, half and three quarters of it left in. Writes
``benchmarks/results/late_rounds.json``. About 15 minutes; losses do not depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import nullcontext
from pathlib import Path

import torch

from thinwire.core.methods.cast import Cast
from thinwire.engine.local import Local, rounds
from thinwire.engine.local.travel import LocalRanks
from thinwire.tools.bench.models.registry import build_model, loss_of
from thinwire.tools.bench.session import reached

RESULTS = Path(__file__).parent / "results" / "late_rounds.json"
MODEL = "chargpt:layers=4:width=144:heads=4:lr=0.0005"
RANKS, EVERY, STEPS, TARGET = 2, 8, 280, 160
DELAYS, SHARES = (1, 2, 3, 7), (0.0, 0.5, 0.75)


Points = list[tuple[float, float]]


def smoothed(points: Points) -> Points:
    """Losses as means over two points on either side, as far as there are as many: a single evaluation is noisy."""
    means = []
    for place, (step, _) in enumerate(points):
        beside = min(2, place, len(points) - 1 - place)
        means.append((step, statistics.fmean(loss for _, loss in points[place - beside : place + beside + 1])))
    return means


def train(seed: int, settings: Local | None) -> Points:
    """The (step, held-out loss) of the outer weights; ``settings`` None: gradients are averaged."""
    workloads = [build_model(MODEL, seed) for _ in range(RANKS)]
    models = [workload.model for workload in workloads]
    losses = [loss_of(workload, rank) for rank, workload in enumerate(workloads)]
    optimizers = [workload.optimizer(workload.model) for workload in workloads]
    world = LocalRanks(settings, [dict(model.named_parameters()) for model in models]) if settings else None
    points: Points = []
    for step in range(STEPS):
        for model, loss, optimizer in zip(models, losses, optimizers):
            optimizer.zero_grad()
            loss(model, step + seed * STEPS).backward()
        if world is None:
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
                for p in same:
                    p.grad = mean
        for optimizer in optimizers:
            optimizer.step()
        if world is not None:
            world.step()
        if (step + 1) % EVERY == 0:
            evaluate = workloads[0].evaluate
            assert evaluate is not None
            with world.rounds[0].outer_weights() if world is not None else nullcontext():
                found = [evaluate(models[0], 0, rank).item() for rank in range(RANKS)]
            points.append((step + 1, statistics.fmean(found)))
    return smoothed(points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    targets = {seed: dict(train(seed, None))[TARGET] for seed in seeds}
    cases = [(0, 0.0), *((delay, share) for delay in DELAYS for share in SHARES if delay > 1 or not share)]
    rows = []
    for delay, share in cases:
        rounds.DEVIATION_KEPT = share
        settings = Local(EVERY, Cast("int8"), fragment_sync_delay=delay)
        took = [reached(train(seed, settings), target) for seed, target in targets.items()]
        rows.append({"delay": delay, "kept": share, "factors": [steps and steps / TARGET for steps in took]})
        ends = ", ".join("never" if one is None else f"{one:.2f}" for one in rows[-1]["factors"])
        print(f"delay {delay}, {share:.0%} kept: {ends}", flush=True)
    RESULTS.write_text(json.dumps({"model": MODEL, "every": EVERY, "target": TARGET, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
