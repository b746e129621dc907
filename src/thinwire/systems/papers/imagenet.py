"""ImageNet in four minutes: large batches with LARS, and all-reduces of 1,024 GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.methods.registry import method
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.hierarchy import way_seconds
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.predict.choose import DEVICES
from thinwire.predict.timeline import simulate
from thinwire.systems.optim import LAMB, LARS, param_groups, scaled_lr, warmup_poly
from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.workbench import Workbench
from thinwire.tools.bench.models.digits import HELD_OUT, enlarged, images

Make = Callable[[nn.Module], torch.optim.Optimizer]
RANKS = Topology(1024, 8)
"""Eight P40 a node, at 10 GB/s between them (PCIe), and a 100 Gb/s card: assumed, as the start-ups below."""
P40 = 4e12
"""FLOP/s in training: assumed, a third of its fp32 peak."""
EPOCHS = 20


def simulated() -> Iterator[Shown]:
    for ways, trees in (("rings", False), ("today's rings or trees", True)):
        costs = Costs.of_link(100e9, 20e-6, 1024, 8, node_bits_per_second=80e9, node_latency_seconds=1e-5, trees=trees,
                              compute=DEVICES["v100"].compute())  # fmt: skip
        for size, name in ((1 << 16, "64 KB"), (1 << 20, "1 MB"), (102_228_128, "ResNet-50's 102 MB")):
            flat, hierarchy = (way_seconds(way, size, costs, RANKS) for way in ("flat", "three_phase"))
            yield Shown(f"{ways} {size}", f"three phases over flat {ways}, {name}, 128 x 8 GPUs", flat / hierarchy)
        profile = builtin("resnet50", batch_size=64, device_flops=P40)
        rows = {"alone": {"fusion": "none"}, "fused": {}, "theirs": {"collective": "threshold:4"}}
        alone, fused, theirs = (
            simulate(method("ssgd", **row), profile, RANKS, costs, backend="nccl", shared_compute=False).step_seconds
            for row in rows.values()
        )
        what = f"ResNet-50 on 1,024 GPUs, fused and three phases up to 4 MB: over flat {ways}"
        yield Shown(f"{ways} step", f"{what}, tensor by tensor", alone / theirs, published="" if trees else "11")
        yield Shown(f"{ways} fused", f"{what}, buckets of 25 MiB", fused / theirs)


def measured(bench: Workbench) -> Iterator[Shown]:
    """The same epochs for all; SGD with the best of three rates, biases of LARS at a hundredth of its rate."""
    data, batch, seeds, epochs = enlarged(), 8192, 1, EPOCHS
    if bench.full:
        data, batch, seeds, epochs = turned(), 32768, 3, EPOCHS // 2
    rows: dict[str, tuple[int, list[Make]]] = {
        "SGD, small batch": (128, [sgd(0.1)]),
        "SGD, scaled": (batch, [sgd(scaled_lr(0.1, batch, 128))]),
        "SGD, tuned": (batch, [sgd(0.2), sgd(0.4), sgd(0.8)]),
        "LARS": (batch, [lambda net: LARS(param_groups(net, 1e-4, skip_lr_scale=0.01), lr=40.0, momentum=0.9)]),
        "LAMB": (batch, [lambda net: LAMB(param_groups(net, 0.01), lr=0.04)]),
    }
    for row, (size, made) in rows.items():
        found = []
        for make in made:
            bench.tell(f"{row}, batch {size:,}, {len(data[0]):,} digits, {epochs} epochs, {seeds} seed(s)")
            found.append(statistics.fmean(accuracy(data, seed, size, make, epochs) for seed in range(seeds)))
        what = f"{row}, batch {size:,} of {len(data[0]):,} digits, {epochs} epochs, {seeds} seed(s): held-out accuracy"
        yield Shown(row, what, 100 * max(found), "%", "75.8, at 64k" if row == "LARS" else "")


def turned(copies: int = 365) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return as ``enlarged`` does, but more: 524,505 by default, at random by up to 15 degrees, 15 %, a pixel."""
    pixels, labels = images()
    known = len(labels) - HELD_OUT
    draw = torch.Generator().manual_seed(0)

    def one() -> Tensor:
        angle, scale, moved = (
            most * (2 * torch.rand(known, count, generator=draw) - 1)
            for count, most in ((1, 0.26), (2, 0.15), (2, 0.25))
        )
        c, s, scale = angle[:, 0].cos(), angle[:, 0].sin(), 1 + scale
        x, y = scale.unbind(1)
        rows = (c * x, -s * y, moved[:, 0], s * x, c * y, moved[:, 1])
        grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [known, 1, 8, 8], align_corners=False)
        return F.grid_sample(pixels[:known], grid, align_corners=False)

    return torch.cat([one() for _ in range(copies)]), labels[:known].repeat(copies), pixels[known:], labels[known:]


def accuracy(data: tuple[Tensor, ...], seed: int, batch: int, make: Make, epochs: int, warm: int = 2) -> float:
    """Return the held-out accuracy of a perceptron after so many epochs, the first ``warm`` with a rising rate."""
    x, y, held_out, wanted = data[0].flatten(1), data[1], data[2].flatten(1), data[3]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for p in net.parameters():
        nn.init.kaiming_normal_(p, nonlinearity="relu") if p.dim() > 1 else nn.init.zeros_(p)
    optimizer, per_epoch = make(net), len(x) // batch
    schedule = warmup_poly(optimizer, total_steps=epochs * per_epoch, warmup_steps=warm * per_epoch)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x))[: per_epoch * batch].split(batch):
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float((net(held_out).argmax(1) == wanted).float().mean())


def sgd(rate: float) -> Make:
    return lambda net: torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    lost = found["SGD, small batch"] - max(found["LARS"], found["LAMB"])
    gained = max(found["LARS"], found["LAMB"]) - found["SGD, tuned"]
    rings, trees = found["rings step"], found["today's rings or trees step"]
    batch = (
        f"With the large batch accuracy is {abs(lost):.1f} points {'below' if lost > 0 else 'above'} that of a "
        f"small one, and {abs(gained):.1f} points {'above' if gained > 0 else 'below'} tuned SGD's"
    )
    network = f"a step of ResNet-50 on 1,024 GPUs is {rings:.1f} times as fast as flat rings tensor by tensor, "
    network += f"{trees:.2f} times as fast as today's trees"
    if lost > 1:
        return "does not hold:", f"{network}. {batch}"
    if trees < 1.2:
        return "holds where", f"sums go around flat rings, as in 2018; {network}. {batch}"
    return "holds", f"{network}. {batch}"


PAPER = Paper(
    system="LARS with mixed precision, hierarchical all-reduce",
    title="Highly Scalable Deep Learning Training System with Mixed-Precision: Training ImageNet in Four Minutes",
    authors="X. Jia, S. Song, W. He, Y. Wang, H. Rong, F. Zhou, L. Xie and 7 others (2018)",
    link="https://arxiv.org/abs/1807.11205",
    claim="a batch of 64k without loss of accuracy (75.8 %); 3 (AlexNet) and 11 times (ResNet-50) NCCL's speed",
    setting="ResNet-50 and AlexNet on 1,024 to 2,048 GPUs (Tesla P40), 100 Gb/s",
    page="large_batch.md",
    needs={"digits": ("sklearn",)},
    main={
        "rings step": "times as fast as flat rings tensor by tensor, ResNet-50, 1,024 GPUs",
        "today's rings or trees step": "times as fast as today's trees, the same",
        "rings 65536": "three phases, times as fast as flat rings, 64 KB",
        "SGD, small batch": "accuracy: SGD, batch 128, digits",
        "SGD, tuned": "SGD, batch 8,192, tuned",
        "LARS": "LARS, batch 8,192",
        "LAMB": "LAMB, batch 8,192",
    },
)
