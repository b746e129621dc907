"""DiLoCo by all-reduce: local steps, and now and then an outer step on the mean difference. No server.

On nodes of equal speed this form sends what the preset sends, spread over all links; the preset survives lost nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.parameter_server.outer import Outer
from thinwire.program import AllReduce, Program, Topology


class Sync(Protocol):
    """What is used of a :class:`thinwire.GradientSync`."""

    topology: Topology

    def run(self, program: Program) -> object:
        """Run a program on all ranks."""


def nesterov(params: list[Tensor]) -> torch.optim.Optimizer:
    """The published outer optimizer: SGD, rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Outer steps of one rank. Call :meth:`step` after each step of the inner optimizer.

    Example::

        sync = tw.attach(model, inner, "ssgd")      # equal weights to begin with, and the group
        diloco = DiLoCo(model, steps=100)
        for batch in data:
            with sync.no_sync():
                loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            diloco.step(sync)

    Args:
        model: its trainable parameters are averaged.
        steps: H, inner steps between two outer steps of a parameter.
        outer: makes the outer optimizer.
        fragments: exchange the parameters in so many parts of about equal size at different times, every
            steps / fragments steps one of them, so that the link is asked for less at a time (Streaming DiLoCo,
            arXiv 2501.18512).

    Differences from the papers: an exchange is not overlapped with the next inner steps, and fragments are runs of
    consecutive parameters.

    Raises:
        ValueError: steps is no multiple of fragments, or there are fewer parameters than fragments.
    """

    def __init__(self, model: nn.Module, *, steps: int = 500, outer: Outer = nesterov, fragments: int = 1) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if steps < 1 or fragments < 1 or steps % fragments:
            raise ValueError(f"steps={steps!r} must be a multiple of fragments={fragments!r}, both at least 1")
        if len(parameters) < fragments:
            raise ValueError(f"fragments={fragments!r}: the model has only {len(parameters)} trainable parameters")
        self._every, self._count = steps // fragments, 0
        self._parts = list(_parts(parameters, fragments))
        self._anchors = [torch.cat([p.detach().reshape(-1) for p in part]).clone() for part in self._parts]
        self._outers = [outer([anchor]) for anchor in self._anchors]

    def step(self, sync: Sync) -> bool:
        """Count an inner step, and exchange what is due. All ranks must call it. Returns whether something was."""
        self._count += 1
        if self._count % self._every:
            return False
        part = (self._count // self._every - 1) % len(self._parts)
        sync.run(self.program(part, sync.topology.world_size))
        return True

    def program(self, part: int, size: int) -> Program:
        """What one of ``size`` ranks does about one fragment."""
        anchor, parameters = self._anchors[part], self._parts[part]
        total = yield AllReduce(anchor - torch.cat([p.detach().reshape(-1) for p in parameters]))
        anchor.grad = total / size
        self._outers[part].step()
        anchor.grad = None
        with torch.no_grad():
            for p, piece in zip(parameters, anchor.split([p.numel() for p in parameters])):
                p.copy_(piece.view(p.shape))


def _parts(parameters: list[nn.Parameter], count: int) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters, cut where the sum passes the next count-th of all elements; none is empty."""
    total, seen, part = sum(p.numel() for p in parameters), 0, []
    made = 0
    for place, p in enumerate(parameters):
        part.append(p)
        seen += p.numel()
        left = len(parameters) - place - 1
        full = seen * count >= total * (made + 1) or left == count - made - 1
        if full and made < count - 1:
            yield part
            part, made = [], made + 1
    yield part
