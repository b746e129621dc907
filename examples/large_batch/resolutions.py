"""Part two: small images first, then larger ones; a residual network with LARS, half precision on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from feed import Feed, Input
from pictures import CLASSES, Decode, Folder, resized
from thinwire.data import ResolutionSchedule, stall
from thinwire.optim import LARS, param_groups, warmup_poly, zero_last_norm
from torch import Tensor, nn

import thinwire as tw

LR, WEIGHT_DECAY = 10.0, 1e-4


class Block(nn.Module):
    """A residual block that halves the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, inputs, side, side]`` -> ``[n, outputs, side / 2, side / 2]``."""
        return F.relu(self.shortcut(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def network() -> nn.Module:
    """For images of any size; every block begins as its shortcut."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * 64, len(CLASSES)),
    )  # fmt: skip
    zero_last_norm(model, Block)
    return model


class Training:
    """A model, LARS and a rate over so many steps; ``step`` is what is done with a batch."""

    def __init__(self, steps: int, warmup_steps: int) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = LARS(param_groups(self.model, WEIGHT_DECAY), LR)
        self.rate = warmup_poly(self.optimizer, total_steps=steps, warmup_steps=warmup_steps)
        # bf16 on the wire; weights, momenta and .grad stay fp32
        self.sync = tw.attach(self.model, self.optimizer, "cast", dtype="bf16")

    def step(self, batch: Any) -> None:
        """Train on one batch of this rank."""
        self.model.train()
        F.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=0.1).backward()
        self.optimizer.step()
        self.rate.step()
        self.optimizer.zero_grad()


def train(
    source: Folder,
    test: tuple[Tensor, Tensor],
    given: Input,
    schedule: ResolutionSchedule,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train through all stages. At each change of size the loader is a new one; the cache goes on.

    Args:
        source: files to train on. test: decoded ones to judge by, at the size that is stored.
        given: with the cache or without.
        schedule: sizes and batches.
        say: where progress goes.
    """
    ranks, stored = dist.get_world_size(), test[0].shape[-1]
    steps = [len(source) // ranks // (schedule.at(e).batch // ranks) for e in range(schedule.epochs)]
    training = Training(sum(steps), warmup_steps=steps[0])
    feed: Feed | None = None
    epochs = []
    for number in range(schedule.epochs):
        stage = schedule.at(number)
        if feed is None or number in schedule.changes:
            if feed is not None:
                feed.close()
            feed = Feed(source, given, stored=stored, size=stage.size, batch=stage.batch)
        before = feed.stats()
        dist.barrier()
        split = stall.measure({"input": feed.epoch(number)}, training.step)["input"]
        dist.barrier()  # every rank's samples are counted
        seen = feed.stats() - before
        found = {
            "size": stage.size,
            "batch": stage.batch,
            "wait_seconds": split.wait_seconds,
            "step_seconds": split.step_seconds,
            "hits": seen.hits_memory,
            "samples": seen.samples,
            "cached_share": feed.cached_share(),
            "accuracy": accuracy(training.model, test, stage.size),
        }
        epochs.append(found)
        say(f"{given.name}, {stage.size} pixels: epoch {number + 1} of {schedule.epochs}, {found['accuracy']:.1%}")
    assert feed is not None
    feed.close()
    sent = training.sync.stats()
    training.sync.close()
    return {"input": given.name, "epochs": epochs, "bytes_sent": sent.bytes_sent, "dense_bytes": sent.dense_bytes}


def decoded(test: Folder, size: int) -> tuple[Tensor, Tensor]:
    """All images of a folder and their labels."""
    prefix = Decode(size)
    pairs = [prefix(test[i]) for i in range(len(test))]
    return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor], size: int) -> float:
    """Of images that were never trained on, as they are."""
    model.eval()
    with torch.no_grad():
        return float((model(resized(test[0], size)).argmax(1) == test[1]).float().mean())
