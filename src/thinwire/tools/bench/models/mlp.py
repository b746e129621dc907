"""A wide perceptron: 100 million parameters and hardly any compute, so that the network dominates."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.tools.bench.models.workload import Workload, beside

CLASSES = 10


def build(width: int = 4480, layers: int = 5, batch: int = 8, lr: float = 0.05) -> Workload:
    """Build ``layers`` square layers and a head. The label of a random vector: the largest of its first ten entries."""
    widths = [width] * (layers + 1)
    if width < CLASSES:
        raise ValueError(f"mlp: width={width} must be at least {CLASSES}")
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(step * 1_000_003 + rank * 7919)
        (x,) = beside(model, torch.randn(batch, width, generator=generator))
        return F.cross_entropy(model(x), x[:, :CLASSES].argmax(1))

    return Workload(
        name="mlp",
        model=nn.Sequential(*modules, nn.Linear(width, CLASSES)),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        describe=f"perceptron, {layers} layers of {width} x {width}, batch {batch}",
    )
