"""Models on made-up data: a wide perceptron, in which the network dominates, and ResNet-18 for 32 x 32 images."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.tools.bench.models.workload import Workload, beside, draws


def mlp(width: int = 4480, layers: int = 5, batch: int = 8, lr: float = 0.05) -> Workload:
    """Build ``layers`` square layers and a head. The label of a random vector: the largest of its first ten entries."""
    widths = [width] * (layers + 1)
    if width < 10:
        raise ValueError(f"mlp: width={width} must be at least 10")
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        (x,) = beside(model, torch.randn(batch, width, generator=draws(step, rank)))
        return F.cross_entropy(model(x), x[:, :10].argmax(1))

    return Workload(
        name="mlp",
        model=nn.Sequential(*modules, nn.Linear(width, 10)),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        describe=f"perceptron, {layers} layers of {width} x {width}, batch {batch}",
    )


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18_network(classes: int = 10, width: int = 64) -> nn.Module:
    """Return the network, 11.17 million parameters with 10 classes."""
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        blocks += [ResidualBlock(inputs, outputs, 1 if stage == 0 else 2), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet18(classes: int = 10, batch: int = 8, width: int = 64, lr: float = 0.005) -> Workload:
    if classes < 2:
        raise ValueError(f"resnet18: classes={classes} must be at least 2")
    patterns = torch.randn(classes, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def loss_of(model: nn.Module, generator: torch.Generator, count: int) -> Tensor:
        labels = torch.randint(classes, (count,), generator=generator)
        images = 0.5 * patterns[labels] + torch.randn(count, 3, 32, 32, generator=generator)
        images, labels = beside(model, images, labels)
        return F.cross_entropy(model(images), labels)

    return Workload(
        name="resnet18",
        model=resnet18_network(classes, width),
        loss=lambda model, step, rank: loss_of(model, draws(step, rank), batch),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        describe=f"ResNet-18 for 32 x 32 images, {classes} classes, batch {batch}",
        evaluate=lambda model, step, rank: loss_of(model, draws(step, rank, held_out=True), 64),
    )
