"""PTO, the parallel tensor operator: each rank computes some layers' ratios, and an all-gather gives all to all ranks.

After the exchange all ranks have the same gradients, and would compute the same norms. If they share the work, each
reads 1/G of the weights and gradients, for one exchange of as many numbers as there are layers.

Differences from the paper (Shi et al. 2020, arXiv 2010.10458): layers are assigned by their size, not in chunks; norms
are not shared if measurements show that it does not pay, since norms in one call cost far less than the published norms
layer by layer.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.methods.base import check_choice
from thinwire.core.methods.decoupling import deferring
from thinwire.core.pricing.placement import Placement, place
from thinwire.core.program import WORLD, AllGather, Program, Scope
from thinwire.engine.sync import GradientSync
from thinwire.predict.measure.timing import Stopwatch, median_seconds

_ROW = 1 << 12
"""Elements per partial sum: a single fp32 sum over millions of squares loses the sixth digit."""


@dataclass(frozen=True)
class Rule:
    """``coefficient * |w| / (|x| + decay * |w| + eps)``, within ``clamp``; 1 if ``|w|`` or ``|x|`` is 0."""

    coefficient: float = 1.0
    decay: float = 0.0
    eps: float = 0.0
    clamp: tuple[float, float] | None = None


@dataclass
class Layers:
    """Tensors under one rule.

    Attributes:
        weights: one per layer, working dtype.
        others: the tensors in the denominator: gradients (LARS) or updates (LAMB), same shapes.
        rule: of these layers.
    """

    weights: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    rule: Rule = field(default_factory=Rule)

    def part(self, indices: Sequence[int]) -> Layers:
        """Return some of the layers."""
        return Layers([self.weights[i] for i in indices], [self.others[i] for i in indices], self.rule)

    def __len__(self) -> int:
        return len(self.weights)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, ``[len(tensors)]``, on their device, without waiting for it.

    Correct to the last digits of fp32 for any size. A tensor's norm does not depend on the other tensors.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors)))
    return torch.stack([_norm(x) for x in tensors])


def _norm(x: Tensor) -> Tensor:
    if x.numel() <= _ROW:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm
    flat = _flat(x)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    if whole < flat.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)])
    return _norm(rows)


def _flat(x: Tensor) -> Tensor:
    """Return all elements as 1-D, in the order in which they lie in memory."""
    if x.is_contiguous():
        return x.view(-1)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).reshape(-1)
    return x.reshape(-1)


def trust_ratios(layers: Layers) -> Tensor:
    """Return the ratio of each layer, ``[len(layers)]``, in their dtype. Zero norms are handled on the device.

    Raises:
        ValueError: there is no layer.
    """
    if not len(layers):
        raise ValueError("trust_ratios needs at least one layer")
    rule, count = layers.rule, len(layers)
    both = norms([*layers.weights, *layers.others])
    weight, other = both[:count], both[count:]
    ratio = rule.coefficient * weight / (other + rule.decay * weight + rule.eps)
    if rule.clamp is not None:
        ratio = ratio.clamp(*rule.clamp)
    return torch.where((weight == 0) | (other == 0), 1.0, ratio)


def replicated(blocks: Sequence[Layers]) -> list[Tensor]:
    """Return the ratios of several rules' layers, all computed on this rank."""
    return [trust_ratios(block) for block in blocks]


logger = logging.getLogger("thinwire")

PARALLEL = (None, "auto", "node", "world")
PARTITIONS = ("cost", "contiguous")
_STEPS = 10


@dataclass(frozen=True)
class ParallelStats:
    """The result of ``optimizer.stats()``.

    Attributes:
        asked: the option ``parallel``. running: "off", "node", "world" or, for the first steps of "auto", "measuring".
        why: the reason, as a sentence.
        layers: how many have a ratio. ranks: how many share them.
        busiest: share of all elements that the busiest rank reads.
        full_seconds: time of all norms on one rank, the slowest; None: not measured.
        shared_seconds: the same, shared over "node" or "world", with the exchange; predicted from measured parts.
    """

    asked: str | None = None
    running: str = "off"
    why: str = ""
    layers: int = 0
    ranks: int = 1
    busiest: float = 1.0
    full_seconds: float | None = None
    shared_seconds: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def split(sizes: Sequence[int], workers: int, partition: str = "cost") -> Placement:
    """Assign layers to workers: longest first, or equal numbers of neighbouring layers (the paper's chunks).

    Args:
        sizes: elements of each layer.
        workers: how many share them.
        partition: "cost" or "contiguous".
    """
    if partition == "cost":
        return place([float(size) for size in sizes], workers)
    owner = tuple(i * workers // len(sizes) for i in range(len(sizes)))
    loads = [0.0] * workers
    for size, worker in zip(sizes, owner):
        loads[worker] += size
    return Placement(owner, max(loads))


def decide(full_seconds: float, shared_seconds: Mapping[str, float]) -> tuple[str, str]:
    """Decide whether to share, and over what: ("off" | "node" | "world", why).

    Args:
        full_seconds: time of all norms, computed on every rank.
        shared_seconds: for each scope over which they could be shared, the time with the exchange.
    """
    if not shared_seconds:
        return "off", "there is nobody to share with"
    best = min(shared_seconds, key=lambda name: shared_seconds[name])
    faster = shared_seconds[best] < full_seconds
    sentence = (
        f"all norms take {full_seconds * 1e6:.0f} us on each rank; shared out over the {best}, "
        f"{shared_seconds[best] * 1e6:.0f} us"
    )
    return (best if faster else "off"), sentence


class TrustRatios:
    """The program that shares ratios. Made once per list of layers; equal on all ranks of the group.

    Args:
        placement: which member of the group computes which layer.
        members: number of ranks in the group.
        group: NODE or WORLD.
        device: of the ratios.
    """

    def __init__(self, placement: Placement, members: int, group: Scope, device: torch.device) -> None:
        self.placement, self.group = placement, group
        self.own = [placement.items(member) for member in range(members)]
        self.longest = max(map(len, self.own))
        index = [0] * len(placement.owner)
        for member, items in enumerate(self.own):
            for position, layer in enumerate(items):
                index[layer] = member * self.longest + position
        self._index = torch.tensor(index, dtype=torch.int64, device=device)

    def reduce(self, blocks: Sequence[Layers], place: int) -> Program:
        """Do one all-gather of as many numbers as the busiest member has layers. Return the ratios of each block.

        Args:
            blocks: all layers, on every rank.
            place: this rank's place in the group.
        """
        found, start = [], 0
        for block in blocks:
            own = [layer - start for layer in self.own[place] if start <= layer < start + len(block)]
            if own:
                found.append(trust_ratios(block.part(own)))
            start += len(block)
        message = blocks[0].weights[0].new_zeros(self.longest)
        if found:
            mine = torch.cat(found)
            message[: mine.numel()] = mine
        table = yield AllGather(message, group=self.group)
        return list(table.reshape(-1)[self._index].split([len(block) for block in blocks]))


@dataclass(frozen=True)
class NormShardingOptions:
    """The options of an optimizer about sharing norms: over which ranks, and how."""

    parallel: str | None = None
    partition: str = "cost"

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, PARALLEL)
        check_choice("partition", self.partition, PARTITIONS)

    def among(self, sync: GradientSync) -> NormSharding | None:
        """Return the sharing over the ranks of a GradientSync; None: norms are not shared.

        Raises:
            ValueError: gradients are delivered in parts, one bucket after the other.
        """
        if self.parallel is None:
            return None
        options = deferring(method := sync.services.method)
        if options is not None and options.update_in_step is not True:
            raise ValueError(
                f"parallel={self.parallel!r} needs all gradients at once, and {method.name} updates parameters "
                "bucket by bucket: attach with update_in_step=True, or give parallel=None"
            )
        if sync.services.topology.world_size == 1:
            logger.warning("thinwire: parallel=%r has no effect on one rank", self.parallel)
        return NormSharding(sync, self)


class NormSharding:
    """The norms of one optimizer, shared over the ranks of one GradientSync."""

    def __init__(self, sync: GradientSync, share: NormShardingOptions) -> None:
        self._sync, self._share = sync, share
        topology = sync.services.topology
        self._scopes = {"world": WORLD} if topology.world_size > 1 else {}
        if topology.two_levels:
            self._scopes["node"] = Scope.NODE
        asked = share.parallel
        if asked == "node" and topology.nodes == 1:
            asked = "world"  # all ranks are on one machine
        self._stats = ParallelStats(share.parallel, "off", "there is nobody to share with")
        if self._scopes and asked == "auto":
            self._stats = ParallelStats("auto", "measuring", f"the first {_STEPS} steps are measured")
        elif asked in self._scopes:
            self._stats = ParallelStats(share.parallel, str(asked), "as asked for")
        self._marks: list[tuple[Any, Any]] = []
        self._programs: dict[tuple[str, tuple[int, ...]], TrustRatios] = {}

    def stats(self) -> ParallelStats:
        """Return what runs, and why."""
        return self._stats

    def ratios(self, blocks: list[Layers]) -> list[Tensor]:
        """Return the ratios of each block. All ranks must call it with the same layers."""
        if not blocks:
            return []
        running = self._stats.running
        if running == "measuring":
            return self._measure(blocks)
        if running == "off":
            return replicated(blocks)
        found: list[Tensor] = self._sync.services.run(
            self._program(running, blocks).reduce(blocks, self._place(running))
        )
        return found

    def _program(self, scope: str, blocks: Sequence[Layers]) -> TrustRatios:
        sizes = tuple(w.numel() for block in blocks for w in block.weights)
        made = self._programs.get((scope, sizes))
        if made is None:
            members = len(self._members(scope))
            placement = split(sizes, members, self._share.partition)
            made = TrustRatios(placement, members, self._scopes[scope], blocks[0].weights[0].device)
            self._programs[scope, sizes] = made
            if scope == self._stats.running:
                busiest = placement.makespan / max(1, sum(sizes))
                self._stats = dataclasses.replace(self._stats, layers=len(sizes), ranks=members, busiest=busiest)
        return made

    def _members(self, scope: str) -> tuple[int, ...]:
        return self._sync.services.topology.members(self._scopes[scope], self._sync.services.rank)

    def _place(self, scope: str) -> int:
        return self._members(scope).index(self._sync.services.rank)

    # --- "auto" ----------------------------------------------------------------------------------------------------

    def _measure(self, blocks: list[Layers]) -> list[Tensor]:
        watch = Stopwatch(blocks[0].weights[0].device)
        start = watch.mark()
        found = replicated(blocks)
        self._marks.append((start, watch.mark()))
        if len(self._marks) == _STEPS:
            watch.settle()
            self._choose(blocks, statistics.median(watch.between(a, b) for a, b in self._marks))
            self._marks.clear()
        return found

    def _choose(self, blocks: list[Layers], full: float) -> None:
        """Time the exchanges, take the slowest rank's values, and decide alike on all ranks."""
        device, size = blocks[0].weights[0].device, sum(w.numel() for block in blocks for w in block.weights)
        mine = [full]
        for name, scope in self._scopes.items():
            program = self._program(name, blocks)
            message = torch.zeros(program.longest, dtype=blocks[0].weights[0].dtype, device=device)
            gather = lambda: self._sync.services.run(_gather(message.clone(), scope))  # noqa: B023, E731
            # The same number of calls on every rank, whatever its clock says.
            exchange = median_seconds(gather, device, seconds=0.0, least=5)
            mine.append(full * program.placement.makespan / max(1, size) + exchange)
        everyone: Tensor = self._sync.services.run(
            _gather(torch.tensor(mine, dtype=torch.float64, device=device), WORLD)
        )
        worst = everyone.max(dim=0).values.tolist()
        shared = dict(zip(self._scopes, worst[1:]))
        running, why = decide(worst[0], shared)
        count = sum(map(len, blocks))
        self._stats = ParallelStats("auto", running, why, count, full_seconds=worst[0], shared_seconds=shared)
        self._programs.clear()
        logger.info("thinwire: parallel=%r is %s: %s", "auto", running, why)


def _gather(x: Tensor, scope: Scope) -> Program:
    return (yield AllGather(x, group=scope))
