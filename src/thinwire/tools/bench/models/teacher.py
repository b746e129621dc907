"""A student learns a two-layer teacher from inputs whose scales span two decades: slow for first-order methods.

x = Q diag(s) z with z Gaussian in R^32, s from 1 down to 0.01 and Q a rotation; the teacher undoes the scales, so that
all directions matter alike: y = W2 relu(W1 x) with W1 = N(0, 2/32) diag(1/s) Q', 48 x 32, and W2 = N(0, 2/48), 10 x 48.
The loss is half the squared error, summed over outputs. 2,048 samples, reshuffled for each pass over them; fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.tools.bench.models.workload import Workload, beside

SAMPLES, INPUTS, HIDDEN, OUTPUTS = 2048, 32, 48, 10


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return all samples: x ``[2048, 32]`` and y ``[2048, 10]``."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    scales = torch.logspace(0, -2, INPUTS, dtype=torch.float64)
    rotation = torch.linalg.qr(normal(INPUTS, INPUTS))[0]
    x = normal(SAMPLES, INPUTS) * scales @ rotation.mT
    first = normal(HIDDEN, INPUTS) * (2 / INPUTS) ** 0.5 / scales @ rotation.mT
    second = normal(OUTPUTS, HIDDEN) * (2 / HIDDEN) ** 0.5
    return x, (x @ first.mT).relu() @ second.mT


def student(seed: int = 0) -> nn.Module:
    """Return a 32-48-10 network with a ReLU; weights like the teacher's without the scales, biases zero."""
    draw = torch.Generator().manual_seed(1000 + seed)
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)]
    with torch.no_grad():
        for layer in layers:
            layer.double().bias.zero_()
            layer.weight.normal_(std=(2 / layer.in_features) ** 0.5, generator=draw)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def half_squares(out: Tensor, y: Tensor) -> Tensor:
    """Return half the squared error, summed over outputs, mean over samples."""
    return 0.5 * (out - y).square().sum() / len(y)


def build(batch: int = 256, ranks: int = 1, lr: float = 0.1, seed: int = 0) -> Workload:
    """Build the workload: ``batch`` samples per step, split over ``ranks``."""
    if ranks < 1 or batch < ranks or batch % ranks or SAMPLES % batch:
        raise ValueError(f"teacher: batch={batch} must divide {SAMPLES} and be a multiple of ranks={ranks}")
    x, y = data(seed)
    per_pass = SAMPLES // batch

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step // per_pass)
        first = step % per_pass * batch + rank % ranks * (batch // ranks)
        chosen = torch.randperm(SAMPLES, generator=draw)[first : first + batch // ranks]
        inputs, outputs = beside(model, x[chosen], y[chosen])
        return half_squares(model(inputs), outputs)

    def evaluate(model: nn.Module, step: int, rank: int) -> Tensor:
        inputs, outputs = beside(model, x, y)
        with torch.no_grad():
            return half_squares(model(inputs), outputs)

    return Workload(
        name="teacher",
        model=student(seed),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        describe=f"student of a two-layer teacher, inputs of scales 1 to 0.01, batch {batch}",
        evaluate=evaluate,
    )
