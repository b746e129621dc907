"""A small convolutional network on scikit-learn's 1,797 real handwritten digits: trained to the end in a minute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.tools.bench.models.workload import Workload, beside, draws

HELD_OUT = 360
SMOOTHING = 0.1  # a floor under the loss, so that ratios stay meaningful once every digit is known


def network(width: int = 32, hidden: int = 256) -> nn.Module:
    """Return two convolutions and two linear layers, from 8 x 8 pixels to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * width, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    """Return all digits in a fixed random order: ``[1797, 1, 8, 8]`` in [0, 1], and labels; the last 360 held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("model digits needs scikit-learn: pip install 'thinwire[digits]'") from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return pixels, torch.tensor(data.target)[order]


def enlarged(copies: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, 64,665 by default, then the 360 held-out ones, unchanged.

    Each of 1,437 digits at nine positions, up to a pixel apart, ``copies`` times with noise of 0.05. Pixels uncovered
    by a shift are blank; wrapped ink would lower all accuracies by about a point.
    """
    pixels, labels = images()
    known = len(labels) - HELD_OUT
    draw = torch.Generator().manual_seed(0)
    padded = F.pad(pixels[:known], (1, 1, 1, 1))
    shifted = [padded[:, :, dy : dy + 8, dx : dx + 8] for dy in range(3) for dx in range(3)]
    noisy = [x + 0.05 * torch.randn(x.shape, generator=draw) for x in shifted for _ in range(copies)]
    return torch.cat(noisy), labels[:known].repeat(9 * copies), pixels[known:], labels[known:]


def build(width: int = 32, hidden: int = 256, batch: int = 32, lr: float = 0.05) -> Workload:
    pixels, labels = images()
    known = len(labels) - HELD_OUT

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        generator = draws(step, rank)
        chosen = torch.randint(known, (batch,), generator=generator)
        dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
        shifted = torch.roll(pixels[chosen], (dy, dx), (2, 3))
        images, wanted = beside(model, shifted, labels[chosen])
        return F.cross_entropy(model(images), wanted, label_smoothing=SMOOTHING)

    def evaluate(model: nn.Module, step: int, rank: int) -> Tensor:
        images, wanted = beside(model, pixels[known:], labels[known:])
        return F.cross_entropy(model(images), wanted, label_smoothing=SMOOTHING)

    return Workload(
        name="digits",
        model=network(width, hidden),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4),
        describe=f"convolutional network, width {width}, batch {batch}, on scikit-learn's digits",
        evaluate=evaluate,
    )
