"""Every method on real ranks, one a device, against LocalWorld on the CPU; then step times and memory. For torchrun.

The gradients are given (a loss that is linear in the parameters has them exactly), so that all differences are those of
the exchange. Rank 0 writes a row of JSON for each method.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.core.collectives.groups import topology_of
from thinwire.tools.bench.device import prepare_rank, rank_device

ALONE = {"fusion": "none"}  # these choose or scale values per bucket, which LocalWorld does not make
METHODS = [
    ("ssgd", {}),
    ("ssgd", {"deterministic": True}),
    ("ssgd", {"collective": "torus"}),
    ("dear", {}),
    ("cast", {"dtype": "bf16"}),
    ("cast", {**ALONE, "dtype": "int8"}),
    ("cast", {**ALONE, "dtype": "int4"}),
    ("acp", {"rank": 2}),
    ("acp", {"rank": 2, "decoupled": True}),
    ("powersgd", {"rank": 2}),
    ("topk", {**ALONE, "density": 0.1}),
    ("topk", {**ALONE, "density": 0.1, "select": "threshold"}),
    ("gtopk", {**ALONE, "density": 0.1}),
    ("oktopk", {**ALONE, "density": 0.1}),
    ("hitopk", {**ALONE, "density": 0.1}),
    ("dgc", {**ALONE, "density": 0.1}),
    ("signsgd", {}),
    ("onebit", {}),
    ("qsgd", {}),
    ("terngrad", {}),
]
DRAWN = ("qsgd", "terngrad")  # a device draws other numbers than a CPU
NEAR = {"cast": 0.02}  # 16-bit sums are added in 16 bits here, in 32 there
ROUNDED = {"signsgd": 1e-3}  # of a tensor: elements so near 0 that their sign is one of rounding, on the CPU
SHAPES = [(300, 200), (200,), (64, 32, 3, 3), (64,), (1000, 40), (40,), ()]
STEPS = 5


class Given(nn.Module):
    """Its gradients are what its forward is told."""

    def __init__(self, shapes):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(s, generator=draw) for s in shapes)

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.weights, gradients))


def gradients(shapes, rank, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(s, generator=draw) for s in shapes]


def exchanged(name, options, rank, device):
    """By how much each step moved the weights at a rate of 1: the averages, whenever they come. On the CPU."""
    net, found = Given(SHAPES).to(device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with tw.attach(net, optimizer, name, keep_dense="none", start_compression_step=0, **options) as sync:
        for step in range(STEPS):
            before = [p.detach().double() for p in net.parameters()]
            net([g.to(device) for g in gradients(SHAPES, rank, step)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.synchronize()
            found.append({n: (b - p.detach()).cpu() for b, (n, p) in zip(before, net.named_parameters())})
    return found


def expected(name, options, topology):
    world, net = tw.LocalWorld(topology.world_size, topology.ranks_per_node), Given(SHAPES)
    names, method, found = [n for n, _ in net.named_parameters()], tw.method(name, **options), []
    for step in range(STEPS):
        found.append(
            world.step(method, [dict(zip(names, gradients(SHAPES, r, step))) for r in range(topology.world_size)])
        )
    return found


def compared(name, options, rank, size, device):
    """A row: the largest difference over all steps, relative to the largest element; None where it says nothing."""
    ours = exchanged(name, options, rank, device)
    row = {"method": name, "options": options, "worst": None, "finite": True, "equal_on_all_ranks": True}
    for step in ours:
        for value in step.values():
            row["finite"] &= bool(value.isfinite().all())
            everyone = [torch.empty_like(value) for _ in range(size)]
            dist.all_gather_object(everyone, value)
            row["equal_on_all_ranks"] &= all(torch.equal(value, other) for other in everyone)
    if name not in DRAWN:
        theirs = [step[rank] for step in expected(name, options, topology_of(size))]
        far = [
            ((a[n] - b[n]).abs() / b[n].abs().max().clamp(min=1e-30)).flatten()
            for a, b in zip(ours, theirs) for n in a
        ]  # fmt: skip
        row["worst"] = max(float(x.max()) for x in far)
        share = ROUNDED.get(name, 0.0) if device.type == "cuda" else 0.0
        counts = [int((x > NEAR.get(name, 1e-3)).sum()) for x in far]
        row["far"], row["elements"] = sum(counts), sum(x.numel() for x in far)
        row["right"] = all(count <= share * x.numel() for count, x in zip(counts, far))
    row["right"] = row.get("right", True) and row["finite"] and row["equal_on_all_ranks"]
    return row


def timed(name, options, rank, device, width, steps=20):
    """Median step and peak memory of a perceptron of eight layers; ``name`` None: DDP."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8))).to(device)
    on_card, seconds = device.type == "cuda", []
    wrapped = nn.parallel.DistributedDataParallel(net) if name is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    options = {key: value for key, value in options.items() if key != "fusion"}
    sync = None if name is None else tw.attach(net, optimizer, name, **options)
    if on_card:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        began = time.perf_counter()
        x = torch.randn(32, width, generator=torch.Generator().manual_seed(step + 100 * rank)).to(device)
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_card:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    if sync is not None:
        sync.close()
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if on_card else None
    return {"method": name or "DDP", "options": options, "step_ms": 1e3 * sorted(seconds)[steps // 2], "MiB": memory}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="of the process group; by default a GPU's beside a CPU's")
    parser.add_argument("--leave-current", action="store_true", help="let the first device be the current one")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="of the methods, those with these names")
    parser.add_argument("--timed", type=int, metavar="WIDTH", help="times in place of comparisons")
    args = parser.parse_args()
    backends = prepare_rank(args.device)
    device = rank_device(args.device)
    if args.leave_current:
        torch.cuda.set_device(0)
    dist.init_process_group(args.backend or backends)
    rank, size = dist.get_rank(), dist.get_world_size()
    methods = [(name, options) for name, options in METHODS if args.only is None or name in args.only]
    for name, options in [(None, {}), *methods] if args.timed else methods:
        if args.timed:
            row = timed(name, options, rank, device, args.timed)
        else:
            row = compared(name, options, rank, size, device)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
