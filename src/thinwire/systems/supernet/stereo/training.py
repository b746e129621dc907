"""Progressive shrinking: all phases one after another; can be resumed at any step.

Differences from the published code: a draw depends only on (seed, phase, step, number); the loss of a batch without a
valid pixel is zero with a graph, so that no rank skips its backward; weights that a step did not use do not change
(``semantics="zero"`` changes them).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.checks import check_choice, check_count, local_path
from thinwire.core.collectives.groups import backend_for
from thinwire.core.methods.registry import resolve
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import AllReduce, Method, Plan, Program
from thinwire.engine.attach import attach
from thinwire.engine.controller.planning import make_plan
from thinwire.engine.parameters import managed_parameters
from thinwire.engine.state import checkpoint
from thinwire.systems.supernet.active import ActiveSet
from thinwire.systems.supernet.operators import ElasticDepthwise
from thinwire.systems.supernet.reduce import ActiveReduce, InactiveWeights
from thinwire.systems.supernet.space import Space, SubNet
from thinwire.systems.supernet.stereo.data import Pairs, StereoBatch, collate, digest, shuffled
from thinwire.systems.supernet.stereo.layers import DeformConv
from thinwire.systems.supernet.stereo.network import ElasticStereo


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
    """Return two phases for small configurations: ``large`` steps of the largest network, then all dimensions at once.

    ``sub_nets``: per step of the second phase.
    """
    top = {name: getattr(space, name)[-1:] for name in space.__dataclass_fields__}
    return (
        Phase("large", Space(**top), large, 2e-3, flat=large * 3 // 4),
        Phase("shrink", space, shrinking, 1e-3, sub_nets=sub_nets, flat=shrinking * 3 // 4, sort=True),
    )


def total(phases: Iterable[Phase]) -> int:
    return sum(phase.steps for phase in phases)


def valid(truth: Tensor, max_disparity: float) -> Tensor:
    """Return where the truth is used: finite, above 0, below the largest disparity."""
    return truth.isfinite() & (truth > 0) & (truth < max_disparity)


def enlarged(disparity: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize ``[B, h, w]`` to ``[B, H, W]``, in pixels of the new size."""
    if tuple(disparity.shape[1:]) == size:
        return disparity
    larger = F.interpolate(disparity.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)
    return larger * (size[1] / disparity.shape[2])


def pyramid_loss(
    disparities: Sequence[Tensor], truth: Tensor, max_disparity: float, valid_total: Tensor | float | None = None
) -> Tensor:
    """Return the sum over maps of the mean smooth-L1 error over valid pixels, weighted 1/3, 2/3, 1, 1, ...

    If no pixel is valid, it is 0 but *with* a graph, so that no rank skips its backward.

    Args:
        disparities: from ``ElasticStereo``, coarse to fine.
        truth: ``[B, H, W]`` in pixels; 0, infinity, NaN and ``max_disparity`` or more are not used.
        valid_total: divisor that replaces this batch's number of valid pixels: with the number over all ranks, divided
            by the number of ranks, the ranks' average is the loss of one large batch.
    """
    mask = valid(truth, max_disparity)
    goal = torch.where(mask, truth, 0.0)
    count = mask.sum() if valid_total is None else torch.as_tensor(valid_total, device=truth.device)
    total = torch.zeros((), dtype=disparities[0].dtype, device=truth.device)
    for i, disparity in enumerate(disparities):
        weight = (1 / 3, 2 / 3)[i] if i < 2 else 1.0
        size = (truth.shape[1], truth.shape[2])
        error = F.smooth_l1_loss(enlarged(disparity, size), goal.to(disparity.dtype), reduction="none")
        total = total + weight * torch.where(mask, error, 0.0).sum()
    return total / count.clamp_min(1)


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
    """A step: its mean loss on this rank, what this rank ran, what of the gradient could be non-zero on any rank."""

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
        semantics: "skip" or "zero", see :class:`~thinwire.supernet.reduce.InactiveWeights`.
        loss_over: "rank": each rank divides by its own number of valid pixels; "world": by that of all ranks, so that
            the ranks together compute the loss of one large batch.
        seed: for the draws; the same on all ranks.
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
    ) -> None:
        check_choice("sampling", sampling, ("shared", "per-rank"))
        check_choice("loss_over", loss_over, ("rank", "world"))
        if divisor == "participants" and sampling == "shared":
            raise ValueError('divisor="participants" is for sampling="per-rank": shared draws are used by every rank')
        for number in range(phase.sub_nets):
            net.space.check(phase.draw(seed, 0, number))
        self.net, self.phase, self.optimizer = net, phase, optimizer
        self._sampling, self._loss_over, self._seed = sampling, loss_over, seed
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
        """Train on this rank's batch."""
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
        """Return the mean loss of all sub-networks; their gradients are reduced."""
        losses: list[Tensor] = []
        for n in nets:
            self.net.activate(n)
            found = self.net(batch.left, batch.right)
            losses.append(pyramid_loss(found, batch.disparity, self.net.max_disparity, valid_total))
        self.sync.services.expect(name for name, bounds in own.bounds.items() if bounds is not None)
        torch.stack(losses).sum().backward()
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
    """Plan fusion for all layers, since a first step's order of arrival is that of a few; None on one rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    managed = managed_parameters(net, method, "auto")
    backend = str(backend_for(next(net.parameters()).device))
    return make_plan(method, managed, [m.index for m in reversed(managed)], (), backend)


def _total(count: Tensor) -> Program:
    return (yield AllReduce(count))


@dataclass(frozen=True)
class PhaseReport:
    """What a phase did in this run."""

    name: str
    steps: int
    done: int  # an earlier run made the others
    seconds: float
    loss: float | None  # of the last step
    bytes_sent: int  # by this rank
    dense_bytes: int  # if everything had been reduced
    mean_share: float  # of the gradient that was active


@dataclass(frozen=True)
class ShrinkReport:
    """What ``shrink`` did, phase by phase."""

    phases: tuple[PhaseReport, ...]
    world_size: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shrink(
    net: ElasticStereo,
    data: Pairs,
    phases: Sequence[Phase],
    *,
    batch: int = 4,
    seed: int = 0,
    weight_decay: float = 1e-4,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 50,
    on_step: Callable[[Phase, int, SupernetStepReport], None] | None = None,
    **options: Any,
) -> ShrinkReport:
    """Train all sub-networks of a network, on the ranks of the default process group if there is one.

    Each phase has its own optimizer, fusion plan and checkpoints. Run again with the same arguments, it continues from
    the newest checkpoint, bit for bit on the same number of ranks.

    Args:
        net: trained in place.
        data: training pairs; every rank can read all of them and uses its share of each step's.
        phases: ``published(...)``, ``short(...)`` or others.
        batch: pairs per rank and step.
        seed: for the draws and the order of pairs; the same on all ranks.
        weight_decay: L2 on weights, but not on BatchNorm or biases.
        checkpoint_dir: on a file system shared by all ranks; None: no checkpoints.
        checkpoint_every: steps; there is always one at the end of a phase.
        options: method, sampling, divisor, semantics and loss_over, as for
            :class:`~thinwire.supernet.stereo.SupernetTrainer`.

    Raises:
        ValueError: options or sizes do not match.
        ScheduleMismatch: the ranks were given different seeds, phases or spaces.
    """
    check_count("batch", batch)
    check_count("checkpoint_every", checkpoint_every)
    if len({phase.name for phase in phases}) != len(phases):
        raise ValueError("every phase needs its own name")
    for phase in phases:
        for number in range(phase.sub_nets):
            net.space.check(phase.draw(seed, 0, number))
    root = None if checkpoint_dir is None else local_path(checkpoint_dir)
    folders = [None if root is None else root / f"{i}-{phase.name}" for i, phase in enumerate(phases)]
    begun = max((i for i, folder in enumerate(folders) if folder and checkpoint.complete(folder)), default=0)
    reports, world = [], 1
    for i, (phase, folder) in enumerate(zip(phases, folders)):
        if i < begun:
            reports.append(PhaseReport(phase.name, phase.steps, 0, 0.0, None, 0, 0, 0.0))
            continue
        if phase.sort:
            net.sort_channels()
        with SupernetTrainer(net, phase, adam(net, phase.lr, weight_decay), seed=seed, **options) as trainer:
            world = trainer.sync.services.topology.world_size
            reports.append(_phase(trainer, data, seed + i, batch, folder, checkpoint_every, on_step))
    net.activate(net.space.largest)
    return ShrinkReport(tuple(reports), world)


def _phase(
    trainer: SupernetTrainer,
    data: Pairs,
    seed: int,
    batch: int,
    folder: Path | None,
    every: int,
    on_step: Callable[[Phase, int, SupernetStepReport], None] | None,
) -> PhaseReport:
    net, phase, sync = trainer.net, trainer.phase, trainer.sync
    first = 0
    if folder is not None:
        first = checkpoint.load(folder, net, trainer.optimizer, sync) or 0
        if first > phase.steps:
            raise ValueError(
                f"{folder} is from a run of {first} steps, but phase {phase.name} has {phase.steps}: give as many "
                "steps, or another checkpoint directory"
            )
    net.train()
    shares, last, started = 0.0, None, time.perf_counter()
    for step in range(first, phase.steps):
        chosen = shuffled(len(data), seed, step, batch, sync.services.rank, sync.services.topology.world_size)
        last = trainer.step(collate(data, chosen), step)
        shares += last.share
        if on_step is not None:
            on_step(phase, step, last)
        if folder is not None and ((step + 1) % every == 0 or step + 1 == phase.steps):
            checkpoint.save(folder, net, trainer.optimizer, sync, step + 1)
    stats, done = sync.stats(), phase.steps - first
    return PhaseReport(
        phase.name, phase.steps, done, time.perf_counter() - started, None if last is None else last.loss,
        stats.bytes_sent, stats.dense_bytes, shares / done if done else 0.0,
    )  # fmt: skip
