"""What does the other site cost where a model is sharded inside sites? ``python benchmarks/sites.py``

In the lab: 2 machines of 2 ranks, 100 Mbit/s between machines. A small decoder (examples/sites/llama.py) is cut over
the two ranks of a machine by FSDP2. *apart* exchanges nothing between machines, *HSDP* averages gradients at every
step, the others average weights every few. All take turns on the same ranks, whole periods each; the mean step of a
turn, and of ``--rounds`` turns the median. Writes ``benchmarks/results/sites.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from in_lab import told
from thinwire.tools.bench.words import split_options

RESULTS = Path(__file__).parent / "results" / "sites.json"
LINK, EVERY = "100mbit", 16
ROWS = (
    "apart",
    "HSDP",
    f"local:sync_every={EVERY}:codec=int2",
    f"local:sync_every={EVERY}:codec=int2:fragment_sync_delay=3",
    f"local:sync_every={EVERY}:codec=int2:fragment_sync_delay=3:fragments=2:anchors=cpu",
)
SIZE = (4, 192, 4, 2, 512, 256)  # of the decoder: 1.8 M parameters


def work(rounds: int) -> None:
    """One rank: every row in turns; rank 0 prints what was found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import thinwire as tw

    sys.path.append(str(Path(__file__).parents[1] / "examples" / "sites"))
    from llama import Model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    contenders: dict[str, Any] = {}
    for label in ROWS:
        torch.manual_seed(0)
        net = Model(*SIZE)
        on = mesh if label == "HSDP" else mesh["shard"]
        for part in (*net.layers, net):
            fully_shard(part, mesh=on)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        sync = None
        if label.startswith("local"):
            name, options = split_options(label)
            sync = tw.adapters.fsdp2.attach(net, optimizer, name, sites=mesh["site"], **options)
        contenders[label] = (net, optimizer, sync, torch.Generator().manual_seed(dist.get_rank()))
    turns: dict[str, list[float]] = {label: [] for label in ROWS}
    for turn in range(rounds + 1):  # the first is not counted
        for label, (net, optimizer, _, data) in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(EVERY):
                tokens = torch.randint(256, (4, 129), generator=data)
                logits = net(tokens[:, :-1]).flatten(0, 1)
                torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            if turn:
                turns[label].append((time.perf_counter() - began) / EVERY)
    for label, (_, _, sync, _) in contenders.items():
        seconds = torch.tensor(statistics.median(turns[label]))
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        sent = None if sync is None else sync.stats().bytes_sent // sync.stats().steps
        if dist.get_rank() == 0:
            print(json.dumps({"label": label, "step_seconds": float(seconds), "bytes": sent}), flush=True)
        if sync is not None:
            sync.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds)
        return
    command = [__file__, "--worker", "--rounds", str(options.rounds)]
    rows = [row for _, _, row in told(command, 4, LINK, 400.0, ranks_per_node=2)]
    alone = rows[0]["step_seconds"]
    RESULTS.write_text(json.dumps({"link": LINK, "ranks": "2 sites of 2", "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['label']:80} {1e3 * row['step_seconds']:7.1f} ms, {row['step_seconds'] / alone:.2f} of apart")


if __name__ == "__main__":
    main()
