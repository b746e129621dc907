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
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_choice
from thinwire.core.methods.decoupling import deferring
from thinwire.core.pricing.placement import Placement, place
from thinwire.core.program import WORLD, AllGather, Program, Scope
from thinwire.engine.sync import GradientSync
from thinwire.predict.measure.kernels import Stopwatch, median_seconds
from thinwire.systems.optim.norms import Layers, trust_ratios

logger = logging.getLogger("thinwire")

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


def split(sizes: Sequence[int], workers: int, partition: str = "cost") -> Placement:
    """Assign layers, by their elements, to workers: "cost": longest first; "contiguous": the paper's chunks."""
    if partition == "cost":
        return place([float(size) for size in sizes], workers)
    owner = tuple(i * workers // len(sizes) for i in range(len(sizes)))
    loads = [0.0] * workers
    for size, worker in zip(sizes, owner):
        loads[worker] += size
    return Placement(owner, max(loads))


def decide(full_seconds: float, shared_seconds: Mapping[str, float]) -> tuple[str, str]:
    """Decide what to share over: ("off" | "node" | "world", why). ``shared_seconds``: with the exchange."""
    if not shared_seconds:
        return "off", "there is nobody to share with"
    best, seconds = min(shared_seconds.items(), key=lambda item: item[1])
    why = f"all norms take {full_seconds * 1e6:.0f} us on each rank; shared out over the {best}, {seconds * 1e6:.0f} us"
    return (best if seconds < full_seconds else "off"), why


class TrustRatios:
    """The program that shares ratios. Made once per list of layers; equal on all ranks of the group.

    Args:
        placement: which member of the group computes which layer. members: number of ranks in the group.
        group: NODE or WORLD. device: of the ratios.
    """

    def __init__(self, placement: Placement, members: int, group: Scope, device: torch.device) -> None:
        self.placement, self.group = placement, group
        self.own = [placement.items(member) for member in range(members)]
        self.longest = max(map(len, self.own))
        index = [0] * len(placement.owner)
        for member, items in enumerate(self.own):
            for position, layer in enumerate(items):
                index[layer] = member * (self.longest + 1) + position
        self._index = torch.tensor(index, dtype=torch.int64, device=device)

    def reduce(self, blocks: Sequence[Layers], place: int, held: bytes = b"") -> Program:
        """Do one all-gather of one number more than the busiest member has layers. Return the ratios of each block.

        ``place``: this rank's, in the group; ``blocks``: all layers, on every rank; ``held``: which parameters have a
        gradient.
        """
        found, start = [], 0
        for block in blocks:
            own = [layer - start for layer in self.own[place] if start <= layer < start + len(block)]
            if own:
                found.append(trust_ratios(block.part(own)))
            start += len(block)
        message = blocks[0].weights[0].new_zeros(self.longest + 1)
        message[-1] = zlib.crc32(held) >> 8  # fp32 has 24 bits
        if found:
            mine = torch.cat(found)
            message[: mine.numel()] = mine
        table = yield AllGather(message, group=self.group)
        told = table.reshape(-1, self.longest + 1)[:, -1]
        if table.device.type == "cpu" and bool((told != told[0]).any()):  # on CUDA the host would wait for it
            raise RuntimeError(
                "ranks share the norms of layers, but have gradients of different parameters: leave .grad as backward "
                "has made it, or give parallel=None"
            )
        return list(table.reshape(-1)[self._index].split([len(block) for block in blocks]))


class NormSharding:
    """The norms of one optimizer: shared over the ranks of a GradientSync once attached, else all computed here."""

    def __init__(self, parallel: str | None = None, partition: str = "cost") -> None:
        check_choice("parallel", parallel, (None, "auto", "node", "world"))
        check_choice("partition", partition, ("cost", "contiguous"))
        self.parallel, self.partition = parallel, partition
        self._told = False
        self.detach()

    def detach(self) -> None:
        self._sync: GradientSync | None = None
        self.stats = ParallelStats(self.parallel)
        self._scopes: dict[str, Scope] = {}
        self._marks: list[tuple[Any, Any]] = []
        self._programs: dict[tuple[str, tuple[int, ...]], TrustRatios] = {}

    def attach(self, sync: GradientSync) -> None:
        if self.parallel is None:
            return
        options = deferring(method := sync.services.method)
        if options is not None and options.update_in_step is not True:
            raise ValueError(
                f"parallel={self.parallel!r} needs all gradients at once, and {method.name} updates parameters "
                "bucket by bucket: attach with update_in_step=True, or give parallel=None"
            )
        topology, asked = sync.services.topology, self.parallel
        if topology.world_size == 1:
            logger.warning("thinwire: parallel=%r has no effect on one rank", asked)
        self._sync = sync
        self._scopes = {"world": WORLD} if topology.world_size > 1 else {}
        if topology.two_levels:
            self._scopes["node"] = Scope.NODE
        if asked == "node" and topology.nodes == 1:
            asked = "world"  # all ranks are on one machine
        self.stats = ParallelStats(self.parallel, "off", "there is nobody to share with")
        if self._scopes and asked == "auto":
            self.stats = ParallelStats("auto", "measuring", f"the first {_STEPS} steps are measured")
        elif asked in self._scopes:
            self.stats = ParallelStats(self.parallel, asked, "as asked for")

    def ratios(self, blocks: list[Layers], held: bytes = b"") -> list[Tensor]:
        """Return the ratios of each block. Ranks that share must all call it, with the same layers."""
        if self._sync is None and self.parallel is not None and not self._told:
            self._told = True
            logger.warning(
                "thinwire: parallel=%r has no effect without ranks: call thinwire.attach(model, optimizer, ...), "
                "on more than one rank",
                self.parallel,
            )
        running = self.stats.running
        if self._sync is None or not blocks or running == "off":
            return list(map(trust_ratios, blocks))
        if running == "measuring":
            return self._measure(blocks, self._sync)
        place = self._members(running, self._sync).index(self._sync.services.rank)
        program = self._program(running, blocks, self._sync)
        found: list[Tensor] = self._sync.services.run(program.reduce(blocks, place, held))
        return found

    def _members(self, scope: str, sync: GradientSync) -> tuple[int, ...]:
        return sync.services.topology.members(self._scopes[scope], sync.services.rank)

    def _program(self, scope: str, blocks: Sequence[Layers], sync: GradientSync) -> TrustRatios:
        sizes = tuple(w.numel() for block in blocks for w in block.weights)
        made = self._programs.get((scope, sizes))
        if made is None:
            members = len(self._members(scope, sync))
            placement = split(sizes, members, self.partition)
            made = TrustRatios(placement, members, self._scopes[scope], blocks[0].weights[0].device)
            self._programs[scope, sizes] = made
            if scope == self.stats.running:
                busiest = placement.makespan / max(1, sum(sizes))
                self.stats = dataclasses.replace(self.stats, layers=len(sizes), ranks=members, busiest=busiest)
        return made

    def _measure(self, blocks: list[Layers], sync: GradientSync) -> list[Tensor]:
        watch = Stopwatch(blocks[0].weights[0].device)
        start = watch.mark()
        found = list(map(trust_ratios, blocks))
        self._marks.append((start, watch.mark()))
        if len(self._marks) == _STEPS:
            watch.settle()
            self._choose(blocks, statistics.median(watch.between(a, b) for a, b in self._marks), sync)
            self._marks.clear()
        return found

    def _choose(self, blocks: list[Layers], full: float, sync: GradientSync) -> None:
        """Time the exchanges, take the slowest rank's values, and decide alike on all ranks."""
        device, size = blocks[0].weights[0].device, sum(w.numel() for block in blocks for w in block.weights)
        mine = [full]
        for name, scope in self._scopes.items():
            program = self._program(name, blocks, sync)
            message = torch.zeros(program.longest, dtype=blocks[0].weights[0].dtype, device=device)
            gather = lambda: sync.services.run(_gather(message.clone(), scope))  # noqa: B023, E731
            # The same number of calls on every rank, whatever its clock says.
            exchange = median_seconds(gather, device, seconds=0.0, least=5)
            mine.append(full * program.placement.makespan / max(1, size) + exchange)
        everyone: Tensor = sync.services.run(_gather(torch.tensor(mine, dtype=torch.float64, device=device), WORLD))
        worst = everyone.max(dim=0).values.tolist()
        shared = dict(zip(self._scopes, worst[1:]))
        running, why = decide(worst[0], shared)
        count = sum(map(len, blocks))
        self.stats = ParallelStats("auto", running, why, count, full_seconds=worst[0], shared_seconds=shared)
        self._programs.clear()
        logger.info("thinwire: parallel=%r is %s: %s", "auto", running, why)


def _gather(x: Tensor, scope: Scope) -> Program:
    return (yield AllGather(x, group=scope))
