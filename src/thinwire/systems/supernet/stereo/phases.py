"""Progressive shrinking as data: which sub-networks each phase draws, how many per step, at which learning rate.

Schedule of the published training (EASNet, ECCV 2022): first the largest network, then kernels, depths, widths and
scales become elastic one after another. A draw depends only on (seed, phase, step, number): it is the same for any
number of ranks and after a resume.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from thinwire.systems.supernet.space import Space, SubNet
from thinwire.systems.supernet.stereo.pairs import digest


@dataclass(frozen=True)
class Phase:
    """One phase of training.

    Attributes:
        name: of the phase; part of every draw.
        space: from which it draws.
        steps: of the optimizer. flat: number of first steps at the full learning rate.
        lr: of Adam at the start; then a half cosine to zero or, with ``halve``, halved every ``halve`` steps.
        sub_nets: how many are drawn per step; their gradients are added.
        sort: sort channels by importance first.
    """

    name: str
    space: Space
    steps: int
    lr: float
    sub_nets: int = 1
    flat: int = 0
    halve: int = 0
    sort: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.sub_nets < 1 or not 0 <= self.flat <= self.steps or self.halve < 0:
            raise ValueError(f"phase {self.name}: steps, sub_nets at least 1; flat at most steps; halve at least 0")
        if not self.lr > 0:
            raise ValueError(f"phase {self.name}: lr={self.lr!r} must be above 0")

    def draw(self, seed: int, step: int, number: int) -> SubNet:
        """Draw a sub-network of a step."""
        return self.space.sample(random.Random(digest("draw", seed, self.name, step, number)))

    def rate(self, step: int) -> float:
        """Return the learning rate at a step."""
        if self.halve:
            return self.lr * 0.5 ** (step // self.halve)
        if step < self.flat:
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.flat) / max(1, self.steps - self.flat)))


def published(epoch: int) -> tuple[Phase, ...]:
    """Return the phases of the paper's Scene Flow training; ``epoch``: steps per epoch (batch 2 on each of 8 GPUs)."""
    whole = Space()
    kernel = Space(depths=(4,), expands=(8,), scales=(4,))
    depth = replace(kernel, depths=(2, 3, 4))
    width = replace(depth, expands=(2, 4, 6, 8))
    return (
        Phase("large", replace(kernel, kernels=(7,)), 64 * epoch, 1e-3),
        Phase("kernel", kernel, 27 * epoch, 5e-4, flat=2 * epoch),
        Phase("depth", depth, 27 * epoch, 5e-4, sub_nets=2, flat=2 * epoch),
        Phase("width", width, 27 * epoch, 5e-4, sub_nets=4, flat=2 * epoch, sort=True),
        Phase("scale", whole, 27 * epoch, 5e-4, sub_nets=6, flat=2 * epoch),
    )


def short(space: Space, large: int = 300, shrinking: int = 300, sub_nets: int = 2) -> tuple[Phase, ...]:
    """Return two phases for small configurations: the largest network, then all dimensions at once.

    Args:
        space: of the network.
        large, shrinking: steps of each phase. sub_nets: per step of the second phase.
    """
    top = {name: getattr(space, name)[-1:] for name in space.__dataclass_fields__}
    return (
        Phase("large", Space(**top), large, 2e-3, flat=large * 3 // 4),
        Phase("shrink", space, shrinking, 1e-3, sub_nets=sub_nets, flat=shrinking * 3 // 4, sort=True),
    )


def total(phases: Iterable[Phase]) -> int:
    """Return the steps of all phases."""
    return sum(phase.steps for phase in phases)
