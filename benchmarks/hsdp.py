"""What does compressing the replicas' exchange bring under HSDP? ``python benchmarks/hsdp.py``

In the lab: 2 machines of 2 ranks, 200 Mbit/s for each machine, no limit inside one. A perceptron of 4 FSDP2 blocks is
cut over the two ranks of a machine and copied over the machines. Plain HSDP and methods of thinwire through
``adapters.fsdp2.attach`` take turns on the same ranks; then the same without a limit on the link, where plain HSDP
should win. Of each row the median step of all turns, its ratio to plain HSDP in the same run, the bytes that a rank
sends between machines, and the loss after the same number of steps. Prints tables and writes
``benchmarks/results/hsdp.json``; ``--show`` prints the file as it is.
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

from rich.console import Console
from rich.table import Table

from thinwire.tools import lab
from thinwire.tools.bench.words import split_options

RESULTS = Path(__file__).parent / "results" / "hsdp.json"
LINKS = ("200mbit", "unlimited")
ROWS = ("hsdp", "ssgd", "cast", "cast:dtype=int8", "acp:rank=4", "topk:density=0.01")
WIDTH, BLOCKS, BATCH = 512, 4, 16


def work(steps: int, rounds: int) -> None:
    """One rank: every row in turns; rank 0 prints what was found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    teacher = torch.randn(WIDTH, 10, generator=torch.Generator().manual_seed(7))
    contenders = {}
    for label in ROWS:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(BLOCKS)]
        net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))
        for part in net:
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        name, options = split_options(label)
        sync = None if label == "hsdp" else tw.adapters.fsdp2.attach(net, name, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        data = torch.Generator().manual_seed(rank)
        contenders[label] = (net, optimizer, sync, data, [], [])

    def step(label: str, timed: bool) -> None:
        net, optimizer, _, data, seconds, losses = contenders[label]
        x = torch.randn(BATCH, WIDTH, generator=data)
        dist.barrier()
        began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(net(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if timed:
            seconds.append(time.perf_counter() - began)
        losses.append(float(loss))

    for label in ROWS:
        step(label, False)
    for _ in range(rounds):
        for label in ROWS:
            for i in range(steps):
                step(label, i > 0)  # the first after another row's turn is not counted
    found = []
    for label, (_, _, sync, _, seconds, losses) in contenders.items():
        figures = torch.tensor([statistics.median(seconds), statistics.mean(losses[-steps:])])
        dist.all_reduce(figures)
        stats = None if sync is None else sync.stats()
        found.append(
            {
                "label": label,
                "step_seconds": float(figures[0]) / 4,
                "loss": float(figures[1]) / 4,
                "bytes": None if stats is None else stats.bytes_sent // stats.steps,
                "dense_bytes": None if stats is None else stats.dense_bytes // stats.steps,
                "steps": len(losses),
            }
        )
    if rank == 0:
        print("FOUND " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(link: str, steps: int, rounds: int) -> dict[str, Any]:
    """One run in the lab."""
    found: list[dict[str, Any]] = []

    def line(rank: int, text: str) -> None:
        if text.startswith("FOUND "):
            found.extend(json.loads(text.removeprefix("FOUND ")))
        else:
            print(f"[{rank}] {text}", file=sys.stderr)

    command = [sys.executable, __file__, "--worker", "--steps", str(steps), "--rounds", str(rounds)]
    print(f"... {link}: {', '.join(ROWS)}", file=sys.stderr, flush=True)
    result = lab.run(lab.Cluster.parse(4, 2, link, None), command, on_line=line, timeout_seconds=160)
    if result.exit_code or not found:
        raise SystemExit(f"the ranks ended with {result.exit_codes}")
    dense = next(row["dense_bytes"] for row in found if row["dense_bytes"])
    return {"link": link, "note": result.note, "emulated": result.emulated, "dense_bytes": dense, "rows": found}


def show(found: dict[str, Any]) -> None:
    """The tables."""
    for run in found["runs"]:
        plain = run["rows"][0]["step_seconds"]
        table = Table(title=f"{run['note']}; {found['cores']} cores", title_justify="left")
        table.add_column("row", no_wrap=True)
        for title in ("step", "plain HSDP over it", "MB a rank sends", "loss"):
            table.add_column(title, justify="right")
        for row in run["rows"]:
            sent = run["dense_bytes"] if row["bytes"] is None else row["bytes"]
            seconds = row["step_seconds"]
            cells = (f"{seconds * 1e3:.1f} ms", f"{plain / seconds:.2f}", f"{sent / 1e6:.3f}", f"{row['loss']:.3f}")
            table.add_row(row["label"], *cells)
        Console(width=110).print(table)
    print(f"loss: mean of the last {found['steps']} of {found['runs'][0]['rows'][0]['steps']} steps, equal data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.steps, options.rounds)
        return
    if not options.show:
        runs = [measure(link, options.steps, options.rounds) for link in LINKS]
        found = {"cores": os.cpu_count(), "steps": options.steps, "runs": runs}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
