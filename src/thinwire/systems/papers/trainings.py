"""What one process trains for a paper: whole trainings on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.systems.optim import warmup_poly
from thinwire.systems.parameter_server import Layout, Link, preset, simulate
from thinwire.systems.parameter_server.synchronous import hierarchical_seconds, synchronous_step_seconds
from thinwire.tools.bench.models.digits import HELD_OUT, images
from thinwire.tools.bench.models.registry import build_model

Make = Callable[[nn.Module], torch.optim.Optimizer]
Run = list[tuple[float, float, float]]
"""Virtual seconds, held-out loss, accuracy."""
SLOW = (1.0, 1.0, 1.5, 4.0)
"""How many times slower each of four nodes of two workers is."""


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


def served(
    text: str, rate: float, bits: float, batch: int, seed: int, seconds: float = 60.0,
    pace: float = 0.1,
) -> Run:  # fmt: skip
    """Return (virtual seconds, held-out loss, accuracy); an all-reduce is BSP on steps that contain the exchange."""
    torch.set_num_threads(1)
    work, link, (pixels, labels) = (
        build_model(f"digits:width=8:hidden=64:batch={batch}", seed),
        Link(5e-4, bits),
        images(),
    )
    net, layout = work.model, Layout.of(work.model)
    takes = [pace * factor for factor in SLOW]
    if text == "all-reduce":
        exchange = hierarchical_seconds(4 * layout.numel, len(SLOW), bits, 5e-4)
        takes = [synchronous_step_seconds(lambda node, *_: pace * SLOW[node], 4, 2, exchange)] * 4
        text, link = "bsp", Link(0.0)
    right: list[float] = []

    def gradient(theta: Tensor, node: int, worker: int, step: int) -> Tensor:
        layout.write(theta, net)
        net.zero_grad()
        work.loss(net, step, 64 * (node + 16 * seed) + worker).backward()
        return layout.gradient(net)

    def held_out(theta: Tensor) -> float:
        layout.write(theta, net)
        with torch.no_grad():
            right.append(float((net(pixels[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]).float().mean()))
        return work.held_out_loss() or 0.0

    trace = simulate(
        replace(preset(text), start_nodes=4), nodes=4, workers=2, seconds=seconds, link=link, server_link=link,
        outer=lambda p: torch.optim.Adam(p, rate, (0.0, 0.999)), step_seconds=lambda node, *_: takes[node],
        parameters=layout.flat(net), gradient=gradient, evaluate=held_out,
    )  # fmt: skip
    return [(at, loss, share) for (at, loss), share in zip(trace.losses, right)]
