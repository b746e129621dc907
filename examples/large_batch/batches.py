"""Part one: batches from 128 to 8192, on scikit-learn's digits, for equal epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thinwire.optim import LAMB, LARS, param_groups, scaled_lr, warmup_poly
from torch import Tensor, nn

import thinwire as tw

BATCHES = SMALL, MIDDLE, LARGE = 128, 1024, 8192
WEIGHT_DECAY = 1e-4
BASE_LR = 0.1  # of SGD at 128 samples per step


@dataclass(frozen=True)
class Recipe:
    """One row of the table: a batch over all ranks, an optimizer with its peak rate, epochs of warm-up."""

    name: str
    batch: int
    lr: float
    warm_epochs: int
    make: Callable[[nn.Module, float], torch.optim.Optimizer]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=WEIGHT_DECAY)


def lars(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    # No norm layers here, so biases get a hundredth of the rate.
    return LARS(param_groups(model, WEIGHT_DECAY, skip_lr_scale=0.01), lr=lr, momentum=0.9)


def lamb(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return LAMB(param_groups(model, 0.01), lr=lr)


# Tuned on this data and network: SGD over 0.1 to 0.8 (unsteady from 0.2 on), LARS over 10, 20, 40, LAMB over 0.01,
# 0.02, 0.04.
RECIPES = (
    *(Recipe("SGD, linearly scaled", n, scaled_lr(BASE_LR, n, SMALL), 1 + (n == LARGE), sgd) for n in BATCHES),
    Recipe("SGD, tuned", LARGE, 0.1, 2, sgd),
    Recipe("LARS", MIDDLE, 10.0, 2, lars),
    Recipe("LARS", LARGE, 40.0, 2, lars),
    Recipe("LAMB", LARGE, 0.04, 2, lamb),
)


def network() -> nn.Module:
    """Two convolutions and two linear layers, small enough for a CPU; no norm layers."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


def train(
    data: tuple[Tensor, ...], recipe: Recipe, *, epochs: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train on all ranks; every rank has the data and takes its share of each batch.

    Args:
        data: training images and labels, held-out images and labels.
        recipe: batch and optimizer.
        epochs: as many for all recipes.
        seed: of the weights and the order.
        say: where progress goes.

    Returns:
        What the tables show; bytes are of one rank.
    """
    x, y, test_x, test_y = data
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = network()
    optimizer = recipe.make(model, recipe.lr)
    per_epoch = len(x) // recipe.batch
    schedule = warmup_poly(optimizer, total_steps=epochs * per_epoch, warmup_steps=recipe.warm_epochs * per_epoch)
    order = torch.Generator().manual_seed(seed)  # the same on all ranks
    accuracy = []
    start = time.perf_counter()
    with tw.attach(model, optimizer, "ssgd") as sync:
        for epoch in range(epochs):
            shuffled = torch.randperm(len(x), generator=order)
            for i in range(per_epoch):
                mine = shuffled[i * recipe.batch : (i + 1) * recipe.batch][rank::size]
                F.cross_entropy(model(x[mine]), y[mine]).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            with torch.no_grad():
                accuracy.append(float((model(test_x).argmax(1) == test_y).float().mean()))
            say(f"{recipe.name}, batch {recipe.batch}: epoch {epoch + 1} of {epochs}, {accuracy[-1]:.1%}")
        sent = sync.stats().bytes_sent
    return {
        "recipe": recipe.name,
        "batch": recipe.batch,
        "lr": recipe.lr,
        "seed": seed,
        "steps": epochs * per_epoch,
        "bytes_sent": sent,
        "seconds": time.perf_counter() - start,
        "accuracy": accuracy,
    }
