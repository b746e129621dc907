"""DiLoCo by all-reduce: local steps, and now and then an outer step on the mean difference. No server.

On nodes of equal speed this form sends what the preset sends, spread over all links; the preset survives lost nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thinwire.local.rounds import cut
from thinwire.parameter_server.outer import Outer
from thinwire.program import WORLD, AllReduce, Program

if TYPE_CHECKING:
    from thinwire.engine.channel import Channel
    from thinwire.engine.sync import GradientSync


def nesterov(params: list[Tensor]) -> torch.optim.Optimizer:
    """The published outer optimizer: SGD, rate 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """Outer steps of one rank. Call :meth:`step` after each step of the inner optimizer.

    Example::

        sync = tw.attach(model, inner, "ssgd")      # equal weights to begin with, and the group
        diloco = DiLoCo(model, sync_every=100)
        for batch in data:
            with sync.no_sync():
                loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            diloco.step(sync)
        diloco.finish()

    Args:
        model: its trainable parameters are averaged.
        sync_every: H, inner steps between two outer steps of a parameter.
        outer: makes the outer optimizer.
        fragments: exchange the parameters in that many parts of about equal size at different times, every
            sync_every / fragments steps one of them, so that the link is asked for less at a time (Streaming DiLoCo,
            arXiv 2501.18512).
        fragment_sync_delay: inner steps that go on while a fragment is exchanged; its outer step follows after them.
            0: the exchange is waited for.
        fragment_update_alpha: share of its own weights that a rank keeps when a fragment comes back, so that the steps
            made meanwhile are not lost (alpha of Streaming DiLoCo). Only at 0 are all ranks' weights equal then.

    Differences from the papers: fragments are runs of consecutive parameters, and differences are sent in the weights'
    precision (there: four bits).

    Raises:
        ValueError: sync_every is no multiple of fragments, there are fewer parameters than fragments,
            fragment_sync_delay is not below sync_every / fragments, or fragment_update_alpha is not from 0 to 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sync_every: int = 500,
        outer: Outer = nesterov,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if sync_every < 1 or fragments < 1 or sync_every % fragments:
            raise ValueError(
                f"sync_every={sync_every!r} must be a multiple of fragments={fragments!r}, both at least 1"
            )
        if len(parameters) < fragments:
            raise ValueError(f"fragments={fragments!r}: the model has only {len(parameters)} trainable parameters")
        every = sync_every // fragments
        if not 0 <= fragment_sync_delay < every:
            raise ValueError(
                f"fragment_sync_delay={fragment_sync_delay!r} must be at least 0 and below "
                f"sync_every / fragments = {every}"
            )
        if not 0 <= fragment_update_alpha <= 1:
            raise ValueError(f"fragment_update_alpha={fragment_update_alpha!r} must be from 0 to 1")
        self._every, self._delay, self._alpha, self._count = every, fragment_sync_delay, fragment_update_alpha, 0
        self._parts = [parameters[p.start : p.stop] for p in cut([x.numel() for x in parameters], fragments)]
        self._anchors = [torch.cat([p.detach().reshape(-1) for p in part]).clone() for part in self._parts]
        self._outers = [outer([anchor]) for anchor in self._anchors]
        self._rounds: Channel | None = None
        self._under_way: int | None = None
        self._mean: Tensor | None = None

    def step(self, sync: GradientSync) -> bool:
        """Count an inner step, and exchange what is due. All ranks must call it. Returns whether a fragment came."""
        self._count += 1
        since = self._count % self._every
        if self._delay == 0:
            if since:
                return False
            sync.services.run(self.program(self._due(), sync.services.topology.world_size))
            return True
        came = since == self._delay and self.finish()
        if since == 0:
            part = self._due()
            if self._rounds is None:
                self._rounds = sync.services.channel("diloco", {WORLD: 1})
            program = self._exchange(self._difference(part), sync.services.topology.world_size)
            self._under_way = part
            self._rounds.begin([[f"fragment {part}"]], lambda _: program)
            self._rounds.ready(0)
        return came

    def finish(self) -> bool:
        """Wait for the fragment that is under way, and make its outer step. All ranks must call it after the last step.

        Returns whether there was one.
        """
        if self._under_way is None:
            return False
        assert self._rounds is not None
        self._rounds.wait()
        part, self._under_way = self._under_way, None
        self._apply(part)
        return True

    def program(self, part: int, size: int) -> Program:
        """What one of ``size`` ranks does about one fragment."""
        yield from self._exchange(self._difference(part), size)
        self._apply(part)

    def _difference(self, part: int) -> Tensor:
        """How far the inner steps have come, ``[elements of the fragment]``."""
        return self._anchors[part] - torch.cat([p.detach().reshape(-1) for p in self._parts[part]])

    def _exchange(self, difference: Tensor, size: int) -> Program:
        total = yield AllReduce(difference)
        self._mean = total / size

    def _due(self) -> int:
        return (self._count // self._every - 1) % len(self._parts)

    @torch.no_grad()
    def _apply(self, part: int) -> None:
        """The outer step on the mean difference that has come."""
        anchor, parameters = self._anchors[part], self._parts[part]
        anchor.grad, self._mean = self._mean, None
        with torch.enable_grad():
            self._outers[part].step()
        anchor.grad = None
        for p, piece in zip(parameters, anchor.split([p.numel() for p in parameters])):
            p.copy_(piece.view(p.shape)) if self._alpha == 0 else p.lerp_(piece.view(p.shape), 1 - self._alpha)
