"""Do shared-out norms (PTO) pay? ``torchrun --standalone --nproc-per-node 2 benchmarks/pto.py``

Each rank times LARS's ratios on a model's shapes: all of them on every rank; shared out over the ranks with their
gather, as ``LARS(parallel="world")`` does it, by cost and in chunks; and the other way to share: squares of a part of
every layer on each rank, and an all-reduce of two sums per layer. Medians of ``--rounds`` medians of ``--steps`` calls,
in turns, of the slowest rank. Rank 0 prints gain or loss, whether all ranks hold the same bits, and what
``parallel="auto"`` would choose by these times. For a real link start it in the lab: ``thinwire lab run --workers 2
--link 1gbit -- python benchmarks/pto.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import thinwire as tw
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import WORLD, AllReduce, Program
from thinwire.systems.optim import LARS, TrustRatios
from thinwire.systems.optim.norms import Layers, Rule, trust_ratios
from thinwire.systems.optim.pto import decide, split

MODELS = ("resnet50", "bert-base", "vgg16")


def layers(model: str) -> list[Layers]:
    draw = torch.Generator().manual_seed(0)
    shapes = [tensor.shape for tensor in builtin(model).tensors if len(tensor.shape) > 1]
    weights, gradients = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2))
    return [Layers(weights, gradients, Rule(0.001, 1e-4))]


def median(call: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def sharded(block: Layers, rank: int, size: int) -> Program:
    """Ratios where each rank holds a part of every layer: squares of the part, summed over ranks, ``[2 L]``."""
    tensors = [x.view(-1) for x in (*block.weights, *block.others)]
    parts = [x[x.numel() * rank // size : x.numel() * (rank + 1) // size] for x in tensors]
    sums = torch.stack([part.dot(part) for part in parts])
    weight, other = (yield AllReduce(sums)).sqrt().chunk(2)
    return block.rule.coefficient * weight / (other + block.rule.decay * weight)


def same_bits(x: torch.Tensor) -> bool:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return all(torch.equal(x, other) for other in everyone)


def measure(model: str, sync: tw.GradientSync, steps: int, rounds: int) -> dict[str, Any]:
    blocks, size = layers(model), sync.services.topology.world_size
    sizes = [w.numel() for w in blocks[0].weights]
    calls: dict[str, Callable[[], Any]] = {"alone": lambda: list(map(trust_ratios, blocks))}
    for partition in ("cost", "contiguous"):
        program = TrustRatios(split(sizes, size, partition), size, WORLD, torch.device("cpu"))
        calls[partition] = lambda program=program: sync.services.run(program.reduce(blocks, sync.services.rank))
    calls["sharded"] = lambda: [sync.services.run(sharded(blocks[0], sync.services.rank, size))]
    results = {name: call()[0] for name, call in calls.items()}  # warm
    torch.testing.assert_close(results["sharded"], results["alone"], rtol=1e-4, atol=0.0)
    times = [{name: median(call, steps) for name, call in calls.items()} for _ in range(rounds)]
    row: dict[str, Any] = {name: statistics.median(found[name] for found in times) for name in calls}
    gains = sorted(1 - found["cost"] / found["alone"] for found in times)
    row |= {"gain": statistics.median(gains), "gain_lowest": gains[0], "gain_highest": gains[-1]}
    row["same_bits"] = all(
        same_bits(results[name]) and torch.equal(results[name], results["alone"]) for name in ("cost", "contiguous")
    )
    row["auto"] = decide(row["alone"], {"world": row["cost"]})[0]
    return {"model": model, "layers": len(sizes), "ranks": size, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    with tw.attach(model, LARS(model.parameters(), 0.1)) as sync:
        rows = [measure(name, sync, options.steps, options.rounds) for name in options.models.split(",")]
    if dist.get_rank() == 0:
        found = Table(title=f"ratios of all layers, {dist.get_world_size()} ranks, ms")
        names = ("model", "layers", "all", "shared", "chunks", "cut up", "gain", "auto")
        for name in names:
            found.add_column(name, justify="right")
        for row in rows:
            found.add_row(
                row["model"], str(row["layers"]),
                *(f"{row[k] * 1e3:.2f}" for k in ("alone", "cost", "contiguous", "sharded")),
                f"{row['gain']:+.0%}", row["auto"],
            )  # fmt: skip
        Console().print(found)
        print("all: on every rank; shared: by cost; cut up: a part of every layer; gain: of shared over all")
        for row in rows:
            bits = "the same bits as alone, on all ranks" if row["same_bits"] else "DIFFERENT BITS"
            print(f"{row['model']}: gain from {row['gain_lowest']:+.0%} to {row['gain_highest']:+.0%} by round; {bits}")
        if options.out is not None:
            options.out.write_text(
                json.dumps({"options": {"steps": options.steps, "rounds": options.rounds}, "rows": rows}, indent=1)
                + "\n"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
