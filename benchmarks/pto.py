"""Do shared-out norms (PTO) pay? ``torchrun --standalone --nproc-per-node 2 benchmarks/pto.py``

Each rank times LARS's ratios on a model's shapes: all of them on every rank, and shared out over the ranks with their
gather, as ``LARS(parallel="world")`` does it; medians, of the slowest rank. Rank 0 prints the table and says whether
sharing gains or loses. Start it in the lab for a real link: ``thinwire lab run --workers 2 --link 1gbit -- python
benchmarks/pto.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import thinwire as tw
from thinwire.optim import LARS, TrustRatios
from thinwire.optim.pto import split
from thinwire.optim.ratios import Layers, Rule, replicated
from thinwire.planner.profiles import builtin
from thinwire.program import WORLD

MODELS = ("resnet50", "bert-base", "vgg16")


def layers(model: str) -> list[Layers]:
    draw = torch.Generator().manual_seed(0)
    shapes = [tensor.shape for tensor in builtin(model).tensors if len(tensor.shape) > 1]
    weights, gradients = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2))
    return [Layers(weights, gradients, Rule(0.001, 1e-4))]


def median(call: Callable[[], object], steps: int) -> float:
    times = []
    for step in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        call()
        if step >= 2:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(model: str, sync: tw.GradientSync, steps: int) -> dict[str, Any]:
    blocks, size = layers(model), sync.topology.world_size
    sizes = [w.numel() for w in blocks[0].weights]
    row: dict[str, Any] = {"model": model, "layers": len(sizes), "alone": median(lambda: replicated(blocks), steps)}
    for partition in ("cost", "contiguous"):
        program = TrustRatios(split(sizes, size, partition), size, WORLD, torch.device("cpu"))
        row[partition] = median(lambda: sync.run(program.reduce(blocks, sync.rank)), steps)  # noqa: B023
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    with tw.attach(model, LARS(model.parameters(), 0.1)) as sync:
        rows = [measure(name, sync, options.steps) for name in MODELS]
    if dist.get_rank() == 0:
        found = Table(title=f"ratios of all layers, {dist.get_world_size()} ranks, ms")
        for name in ("model", "layers", "on every rank", "shared by cost", "shared in chunks", "sharing"):
            found.add_column(name, justify="right")
        for row in rows:
            best = min(row["cost"], row["contiguous"])
            gain = "gains" if best < row["alone"] else "loses"
            found.add_row(
                row["model"], str(row["layers"]), *(f"{row[k] * 1e3:.2f}" for k in ("alone", "cost", "contiguous")),
                f"{gain} {abs(best - row['alone']) * 1e3:.2f} ms",
            )  # fmt: skip
        Console().print(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
