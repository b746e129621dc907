"""One training step: several sub-networks, and one reduction of what they used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.core.collectives.groups import backend_for
from thinwire.core.methods.registry import resolve
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import AllReduce, Method, Plan, Program
from thinwire.engine.attach import attach
from thinwire.engine.controller.planning import make_plan
from thinwire.engine.parameters import managed_parameters
from thinwire.systems.supernet.active import ActiveSet
from thinwire.systems.supernet.operators import ElasticDepthwise
from thinwire.systems.supernet.reduce import ActiveReduce
from thinwire.systems.supernet.semantics import InactiveWeights
from thinwire.systems.supernet.space import SubNet
from thinwire.systems.supernet.stereo.deform import DeformConv
from thinwire.systems.supernet.stereo.loss import pyramid_loss, valid
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.pairs import StereoBatch
from thinwire.systems.supernet.stereo.phases import Phase

SAMPLING = ("shared", "per-rank")
LOSS_OVER = ("rank", "world")


def adam(net: nn.Module, lr: float, weight_decay: float = 1e-4) -> torch.optim.Adam:
    """Return Adam with L2 on the weights of convolutions and kernel maps, but not on BatchNorm or biases."""
    weights = [
        p
        for module in net.modules()
        if isinstance(module, (nn.Conv2d, DeformConv, ElasticDepthwise, nn.ParameterDict))
        for name, p in module.named_parameters(recurse=False)
        if name != "bias"
    ]
    decayed = {id(p) for p in weights}
    others = [p for p in net.parameters() if id(p) not in decayed]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": weight_decay}, {"params": others}]
    return torch.optim.Adam(groups, lr=lr)


def reduction(method: Method | str, divisor: str = "world") -> Method:
    """Return the method to attach: for "active", for "dense", or for a method to run on the active part."""
    if isinstance(method, ActiveReduce):
        return method
    if method == "dense":
        if divisor != "world":
            raise ValueError('method="dense" averages over all ranks: divisor must be "world"')
        return SSGD()
    return ActiveReduce(SSGD() if method == "active" else resolve(method), divisor)


@dataclass(frozen=True)
class SupernetStepReport:
    """The result of a step.

    Attributes:
        loss: mean over its sub-networks, on this rank. sub_nets: those that this rank ran.
        share: share of gradient elements that could be non-zero on any rank. elements: how many these are.
    """

    loss: float
    sub_nets: tuple[SubNet, ...]
    share: float
    elements: int


class SupernetTrainer:
    """A network, an optimizer and a reduction for one phase. All ranks create one, and all call ``step``.

    Args:
        net: trained in place.
        phase: what to draw. optimizer: of the network's parameters.
        method: "active" (exact, only what was used), "dense" (exact, everything) or a method to run on the active part,
            such as ``tw.TopK(density=0.01)``.
        sampling: "shared": all ranks run the same sub-networks; "per-rank": each its own, which all derive from the
            seed.
        divisor: "world", or "participants": each element is averaged over the ranks that used it (per-rank only).
        semantics: "skip" or "zero", see :class:`~thinwire.supernet.semantics.InactiveWeights`.
        loss_over: "rank": each rank divides by its own number of valid pixels; "world": by that of all ranks, so that
            the ranks together compute the loss of one large batch.
        seed: for the draws; the same on all ranks.
        overlap: one backward for all sub-networks of a step, during which the exchange runs; it keeps the activations
            of all of them. False: one backward after another, then the exchange.
    """

    def __init__(
        self,
        net: ElasticStereo,
        phase: Phase,
        optimizer: torch.optim.Optimizer,
        *,
        method: Method | str = "active",
        sampling: str = "shared",
        divisor: str = "world",
        semantics: str = "skip",
        loss_over: str = "rank",
        seed: int = 0,
        overlap: bool = True,
    ) -> None:
        if sampling not in SAMPLING:
            raise ValueError(f'sampling={sampling!r} must be "shared" or "per-rank"')
        if loss_over not in LOSS_OVER:
            raise ValueError(f'loss_over={loss_over!r} must be "rank" or "world"')
        if divisor == "participants" and sampling == "shared":
            raise ValueError('divisor="participants" is for sampling="per-rank": shared draws are used by every rank')
        for number in range(phase.sub_nets):
            net.space.check(phase.draw(seed, 0, number))
        self.net, self.phase, self.optimizer = net, phase, optimizer
        self._sampling, self._loss_over, self._seed, self._overlap = sampling, loss_over, seed, overlap
        self._method = reduction(method, divisor)
        self._active: ActiveSet | None = None
        self._inactive = InactiveWeights(optimizer, net, lambda: self._active, semantics)
        try:
            self.sync = attach(net, optimizer, self._method, plan=whole_plan(net, self._method))
        except BaseException:
            self._inactive.remove()
            raise

    def draws(self, step: int, rank: int) -> list[SubNet]:
        """Return the sub-networks that a rank runs at a step; every rank can compute those of every rank."""
        count = self.phase.sub_nets
        first = rank * count if self._sampling == "per-rank" else 0
        return [self.phase.draw(self._seed, step, first + number) for number in range(count)]

    def step(self, batch: StereoBatch, step: int) -> SupernetStepReport:
        """Train on this rank's batch.

        Raises:
            ScheduleMismatch: the ranks have drawn different sub-networks.
        """
        world = self.sync.services.topology.world_size
        nets = self.draws(step, self.sync.services.rank)
        if self._sampling == "shared":
            everyone = [ActiveSet.union([self.net.active_set(n) for n in nets])] * world
        else:
            everyone = [ActiveSet.union([self.net.active_set(n) for n in self.draws(step, r)]) for r in range(world)]
        self._active = everyone[0] if self._sampling == "shared" else ActiveSet.union(everyone)
        if isinstance(self._method, ActiveReduce):
            self._method.announce(self._active, self.sync, step, everyone)
        for group in self.optimizer.param_groups:
            group["lr"] = self.phase.rate(step)
        total: Tensor | None = None
        if self._loss_over == "world":
            mask = valid(batch.disparity, self.net.max_disparity)
            total = self.sync.services.run(_total(mask.sum().double())) / world
        loss = self._backward(batch, nets, everyone[self.sync.services.rank], total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return SupernetStepReport(loss, tuple(nets), self._active.share, self._active.elements)

    def _backward(self, batch: StereoBatch, nets: list[SubNet], own: ActiveSet, valid_total: Tensor | None) -> float:
        """Compute and reduce the gradients of all sub-networks. Return the mean loss."""
        losses: list[Tensor] = []
        for n in nets:
            self.net.activate(n)
            found = self.net(batch.left, batch.right)
            losses.append(pyramid_loss(found, batch.disparity, self.net.max_disparity, valid_total))
            if not self._overlap:
                with self.sync.no_sync():
                    losses[-1].backward()
        if self._overlap:
            self.sync.services.expect(name for name, bounds in own.bounds.items() if bounds is not None)
            torch.stack(losses).sum().backward()
        else:
            self.sync.synchronize()
        return float(torch.stack(losses).detach().mean())

    def close(self) -> None:
        """Remove the hooks; the network keeps its weights."""
        self._inactive.remove()
        self.sync.close()

    def __enter__(self) -> SupernetTrainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def whole_plan(net: nn.Module, method: Method) -> Plan | None:
    """Return the fusion plan of the whole network, in the reverse order of its layers; None on one rank.

    The order of arrival in a first step would only be that of a few sub-networks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    managed = managed_parameters(net, method, "auto")
    backend = str(backend_for(next(net.parameters()).device))
    return make_plan(method, managed, [m.index for m in reversed(managed)], (), backend)


def _total(count: Tensor) -> Program:
    return (yield AllReduce(count))
