"""EASNet over thin links: everything reduced, the active part alone, DDP. ``python benchmarks/supernet.py``

The network at published size, in the lab, one worker a node; rows in turns on the same ranks, on the same draws and
pairs; median over steps. Bytes are checked against 4 bytes for each active element, exactly. Prints tables and writes
``benchmarks/results/supernet.json``. Cases where a row loses are in the tables like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire as tw
from thinwire.systems.supernet import Space
from thinwire.systems.supernet.stereo import (
    ElasticStereo,
    Phase,
    RandomDots,
    SupernetTrainer,
    batches,
    measure_net,
    published,
    pyramid_loss,
)
from thinwire.systems.supernet.stereo.training import adam
from thinwire.tools import lab

RESULTS = Path(__file__).parent / "results" / "supernet.json"
SIZE = (48, 96)
WANTED = {"dense": 0.80, "ddp": 0.65}  # of the active row, at 100 Mb/s
ROWS = ("dense", "active", "active topk", "ddp")


class Several(nn.Module):
    """All sub-networks of a step in one forward: the only way in which DDP reduces what an early one used."""

    def __init__(self, net: ElasticStereo) -> None:
        super().__init__()
        self.net, self.nets = net, [net.space.largest]

    def forward(self, left: torch.Tensor, right: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """The sum of their losses."""
        total = torch.zeros(())
        for n in self.nets:
            self.net.activate(n)
            total = total + pyramid_loss(self.net(left, right), truth, self.net.max_disparity)
        return total


class Row:
    """One way to make a step."""

    def __init__(self, name: str, phase: Phase) -> None:
        torch.manual_seed(0)
        self.net, self.phase = ElasticStereo(), phase
        self.net.train()
        self.optimizer = adam(self.net, phase.lr)
        self.trainer, self.elements = None, 0
        if name == "ddp":
            self.several = Several(self.net)
            self.ddp = nn.parallel.DistributedDataParallel(self.several, find_unused_parameters=True)
        else:
            method = tw.TopK(density=0.01) if name == "active topk" else name
            self.trainer = SupernetTrainer(self.net, phase, self.optimizer, method=method)

    def step(self, batch: Any, step: int) -> None:
        """Train."""
        if self.trainer is not None:
            self.elements += self.trainer.step(batch, step).elements
            return
        self.several.nets = [self.phase.draw(0, step, j) for j in range(self.phase.sub_nets)]
        self.ddp(batch.left, batch.right, batch.disparity).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def worker(out: Path, steps: int, phase: Phase) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = {name: Row(name, phase) for name in ROWS}
    data = list(batches(RandomDots(world * 4, *SIZE, 40), 1))[rank * 4 : rank * 4 + 4]
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for step in range(steps + 1):
        for name, row in rows.items():
            dist.barrier()
            start = time.perf_counter()
            row.step(data[step % 4], step)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if step:  # memory is warm, state is made
                times[name].append(float(took))
            if rank == 0:
                print(f"@@{phase.name}: step {step} of {steps}, {name}: {float(took):.2f} s", flush=True)
    found = []
    for name, row in rows.items():
        stats = row.trainer.sync.stats() if row.trainer else None
        found.append(
            {
                "row": name,
                "seconds": statistics.median(times[name]),
                "times": times[name],
                "bytes_per_step": stats.bytes_sent / (steps + 1) if stats else None,
                "exposed_seconds": stats.exposed_seconds / (steps + 1) if stats else None,
                "elements": row.elements / (steps + 1),
            }
        )
        if name == "active" and stats:
            wanted = 2 * (world - 1) * 4 * row.elements / world + 8 * (world - 1) * (steps + 1)
            assert abs(stats.bytes_sent - wanted) <= world * len(stats.buckets) * (steps + 1) * (world > 2), (
                f"sent {stats.bytes_sent}, wanted {wanted}"
            )
        if row.trainer:
            row.trainer.close()
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def phase_of(name: str) -> Phase:
    """ "last:2" is the last published phase with two sub-networks a step."""
    base, _, count = name.partition(":")
    phase = {p.name: p for p in published(1000)}[{"last": "scale"}.get(base, base)]
    return Phase(name, phase.space, phase.steps, phase.lr, sub_nets=int(count or phase.sub_nets))


def in_lab(name: str, workers: int, link: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--worker", str(out), "--phases", name, "--steps", str(steps)]
        words: list[str] = []

        def on_line(rank: int, text: str) -> None:
            words.append(text)
            if text.startswith("@@"):
                print(f"... {workers} workers, {link}: {text[2:]}", file=sys.stderr, flush=True)

        cluster = lab.Cluster.parse(workers, 1, link, None)
        launched = lab.run(cluster, command, on_line=on_line, timeout_seconds=1200)
        if launched.exit_code or not out.exists():
            sys.exit("\n".join(["the ranks failed; their last words:", *words[-15:]]))
        rows = json.loads(out.read_text())
    by = {row["row"]: row["seconds"] for row in rows}
    return {
        "phase": name, "sub_nets": phase_of(name).sub_nets, "workers": workers, "link": link, "rows": rows,
        "emulated": launched.emulated, "active_over_dense": by["active"] / by["dense"],
        "active_over_ddp": by["active"] / by["ddp"],
    }  # fmt: skip


def show(case: dict[str, Any]) -> None:
    title = f"{case['workers']} workers, {case['link']}, {case['sub_nets']} sub-network(s) a step ({case['phase']})"
    table = Table(title=title)
    for name in ("row", "step", "of dense", "MB per step", "exposed"):
        table.add_column(name, justify="left" if name == "row" else "right")
    dense = case["rows"][0]["seconds"]
    for row in case["rows"]:
        sent, exposed = row["bytes_per_step"], row["exposed_seconds"]
        table.add_row(
            row["row"], f"{row['seconds']:.2f} s", f"{row['seconds'] / dense:.2f}",
            f"{sent / 1e6:.2f}" if sent is not None else "-", f"{exposed:.2f} s" if exposed is not None else "-",
        )  # fmt: skip
    Console().print(table)
    for other, limit in WANTED.items():
        ratio = case[f"active_over_{other}"]
        print(f"active against {other}: {ratio:.2f}; at most {limit} wanted: {'held' if ratio <= limit else 'missed'}")


def ranges(size: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """Latency of the smallest and the largest network, with the refinement as published and elastic."""
    spaces = {"published": Space(), "elastic refinement": Space(refine_widths=(16, 32), refine_depths=(2, 4, 6))}
    found = []
    for name, space in spaces.items():
        net = ElasticStereo(space)
        low, high = (measure_net(net, n, size, repeats).p50 for n in (space.smallest, space.largest))
        found.append({"space": name, "size": size, "smallest_ms": low, "largest_ms": high, "ratio": high / low})
        print(f"{name}: smallest {low:.1f} ms, largest {high:.1f} ms, {high / low:.2f} times")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--phases", default="last:1,last:2,last:6", help="large, kernel, depth, width, last; name:count"
    )
    parser.add_argument("--workers", default="2")
    parser.add_argument("--links", default="100mbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranges", action="store_true", help="only the latency range of the space")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps, phase_of(options.phases))
        return
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"cases": [], "ranges": []}
    if options.ranges:
        torch.set_num_threads(1)
        kept["ranges"] = ranges((96, 192), 7)
    else:
        for link in options.links.split(","):
            for workers in map(int, options.workers.split(",")):
                for name in options.phases.split(","):
                    case = in_lab(name, workers, link, options.steps)
                    show(case)
                    key = (case["phase"], case["workers"], case["link"])
                    others = [c for c in kept["cases"] if (c["phase"], c["workers"], c["link"]) != key]
                    kept["cases"] = [*others, case]
    kept["machine"] = {"processor": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
