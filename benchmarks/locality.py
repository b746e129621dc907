"""What does drawing from a machine's own block cost in accuracy? ``python benchmarks/locality.py``

``LocalitySampler`` shuffles inside each machine's block, and blocks never change; a global shuffle deals all samples
out anew in every epoch. For machines of one rank each: how far the classes that a machine sees in an epoch are from
those of the whole data set (half the sum of the differences of shares, 0 to 1), and the accuracy on held-out digits
after training with the average of all machines' gradients. Beside them, what the sampler avoids: blocks cut from data
that are sorted by class. Writes ``benchmarks/results/locality.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.core.kernels.seeding import generator
from thinwire.systems.data import CachedDataset, LocalitySampler
from thinwire.tools.bench.models.digits import HELD_OUT, images, network

RESULTS = Path(__file__).parent / "results" / "locality.json"
HOWS = ("global shuffle", "locality", "sorted blocks")


def keep(value: Any) -> Any:
    return value


def orders(how: str, source: Any, nodes: int, epochs: int, seed: int, directory: str) -> list[list[Tensor]]:
    """``[epoch][node]``: the samples that a machine sees, in order; equally many on all."""
    count = len(source) // nodes
    if how == "locality":
        datasets = [
            CachedDataset(
                source, keep, dataset_id="locality", version=1, prefix_id="keep", memory_bytes=8 << 20,
                directory=directory, seed=seed, node=node, nodes=nodes,
            )
            for node in range(nodes)
        ]  # fmt: skip
        samplers = [LocalitySampler(dataset, rank=node, ranks_per_node=1) for node, dataset in enumerate(datasets)]
        found = [[torch.tensor(sampler.order(epoch)) for sampler in samplers] for epoch in range(epochs)]
        for dataset in datasets:
            dataset.close(delete=True)
        return found
    by_class = torch.tensor([label for _, label in source]).argsort(stable=True)
    found = []
    for epoch in range(epochs):
        draw = generator(seed, "order", epoch)
        if how == "global shuffle":
            whole = torch.randperm(len(source), generator=draw)
            found.append([whole[node::nodes][:count] for node in range(nodes)])
        else:
            blocks = [by_class[node * count : (node + 1) * count] for node in range(nodes)]
            found.append([block[torch.randperm(count, generator=draw)] for block in blocks])
    return found


def distance(labels: Tensor, chosen: Tensor) -> float:
    """Between the class shares of some samples and of all: total variation."""
    shares = [torch.bincount(some, minlength=10).double() / len(some) for some in (labels[chosen], labels)]
    return float((shares[0] - shares[1]).abs().sum() / 2)


def train(pixels: Tensor, labels: Tensor, plan: list[list[Tensor]], per_node: int, seed: int) -> float:
    """Accuracy on held-out digits. A batch has ``per_node`` samples of each machine: its gradient is the average."""
    known = len(labels) - HELD_OUT
    torch.manual_seed(seed)
    model = network(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in plan:
        for start in range(0, len(epoch[0]) - per_node + 1, per_node):
            chosen = torch.cat([order[start : start + per_node] for order in epoch])
            optimizer.zero_grad()
            F.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(pixels[known:]).argmax(1) == labels[known:]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="4,16")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="over all machines")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pixels, labels = images()
    known = len(labels) - HELD_OUT
    source = [(pixels[i], int(labels[i])) for i in range(known)]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for nodes in map(int, options.nodes.split(",")):
            for how in HOWS:
                ends, apart, worst = [], [], []
                for seed in range(options.seeds):
                    plan = orders(how, source, nodes, options.epochs, seed, directory)
                    far = [distance(labels[:known], order) for epoch in plan for order in epoch]
                    apart.append(statistics.mean(far))
                    worst.append(max(far))
                    ends.append(train(pixels, labels, plan, options.batch // nodes, seed))
                row = {"nodes": nodes, "shuffle": how, "accuracy": ends}
                rows.append({**row, "distance": statistics.mean(apart), "worst_distance": max(worst)})
    found = Table(title=f"digits, {options.epochs} epochs, batch {options.batch}, {options.seeds} seeds")
    for name in ("machines", "shuffle", "class distance", "worst", "accuracy", "by seed"):
        found.add_column(name, justify="left" if name == "shuffle" else "right")
    for row in rows:
        found.add_row(
            str(row["nodes"]), row["shuffle"], f"{row['distance']:.3f}", f"{row['worst_distance']:.3f}",
            f"{statistics.median(row['accuracy']):.1%}", " ".join(f"{end:.1%}" for end in row["accuracy"]),
        )  # fmt: skip
    Console().print(found)
    options.out.parent.mkdir(exist_ok=True)
    figures = {"options": {key: value for key, value in vars(options).items() if key != "out"}, "rows": rows}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
