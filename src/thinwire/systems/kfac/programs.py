"""The programs of K-FAC: average statistics; send inverses and preconditioned gradients from the ranks that have them.

A *factor* is one side of a layer, ``<layer>/A`` or ``<layer>/G``. Each program is a method on a bucket whose slots are
rows of packed numbers instead of gradients, so the engine, LocalWorld and the simulator run it like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.pricing.costs import Costs
from thinwire.core.program import AllGather, AllReduce, Broadcast, Bucket, Method, Program, Scope, State, Topology

FACTOR, UPDATES = "factor", "updates"
"""Shared fields of a factor: its packed running average, and the number of updates in it."""

Decay = Callable[[Tensor], Tensor]
"""Updates so far (0-dim) -> the weight of the old average in the next update."""


@dataclass(frozen=True)
class FactorExchange(Method):
    """Average new statistics over the ranks that have one, and add them to the running averages.

    A slot is a packed statistic followed by its count: 1, or 0 if this rank did not see the layer. The new statistic is
    exchanged, never the average, so the averages are always equal on all ranks. If a statistic is not finite on some
    rank, the sum is not finite on any rank, and the averages do not change.

    Attributes:
        decay: see ``Decay``; None: replace the old average.
        wire: dtype in which statistics are sent; None: unchanged.
    """

    name: ClassVar[str] = "factors"
    exact: ClassVar[bool] = True
    cheap_pack: ClassVar[bool] = True

    decay: Decay | None = None
    wire: torch.dtype | None = None

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Run one all-reduce."""
        flat = bucket.flat
        total = yield AllReduce(flat if self.wire is None else flat.to(self.wire))
        for slot, row in zip(bucket.slots, bucket.split(total.to(flat.dtype))):
            count = row[-1]
            mean = row[:-1] / count.clamp(min=1)
            self._fold(slot.name, mean, (count > 0) & mean.isfinite().all(), state)

    def _fold(self, name: str, mean: Tensor, usable: Tensor, state: State) -> None:
        old = state.fields.get((FACTOR, name))
        if old is None:
            old, updates = torch.zeros_like(mean), torch.zeros((), dtype=mean.dtype, device=mean.device)
        else:
            updates = state.fields[UPDATES, name]
        keep = torch.zeros_like(updates) if self.decay is None else self.decay(updates)
        keep = torch.where(updates == 0, torch.zeros_like(keep), keep)
        new = torch.where(usable, keep * old + (1 - keep) * mean, old)
        state.stage(name, shared={FACTOR: new, UPDATES: updates + usable.to(updates.dtype)})

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Return the seconds to fill the bucket (two passes over memory), and to update the averages (four)."""
        size = 4 * sum(map(math.prod, shapes))
        return [costs.compute_seconds("memory", 2 * size), costs.compute_seconds("memory", 4 * size)]


@dataclass(frozen=True)
class FromOwner(Method):
    """Send one rank's rows to its whole group: inverses to the preconditioning ranks, or preconditioned gradients.

    Attributes:
        owner: position in the group of the rank that has the rows; the others' slots have no value.
        group: WORLD, NODE or CROSS.
    """

    name: ClassVar[str] = "from_owner"
    exact: ClassVar[bool] = True
    cheap_pack: ClassVar[bool] = True

    owner: int = 0
    group: Scope = Scope.WORLD

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Run one broadcast."""
        bucket.write((yield Broadcast(bucket.flat, self.group, self.owner)))

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Return the seconds to fill the bucket, and to read it."""
        size = 4 * sum(map(math.prod, shapes))
        return [costs.compute_seconds("memory", 2 * size), costs.compute_seconds("memory", 2 * size)]


@dataclass(frozen=True)
class FromAll(Method):
    """Send every rank's rows to its whole group in one all-gather, padded to the longest message.

    Attributes:
        owners: for each slot, the position of its owner in the group.
        group: WORLD, NODE or CROSS.
    """

    name: ClassVar[str] = "from_all"
    exact: ClassVar[bool] = True
    cheap_pack: ClassVar[bool] = True

    owners: tuple[int, ...] = ()
    group: Scope = Scope.WORLD

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Run one all-gather."""
        members = state.topology.members(self.group, state.rank)
        place, lengths = members.index(state.rank), [0] * len(members)
        for slot, owner in zip(bucket.slots, self.owners, strict=True):
            lengths[owner] += slot.numel
        own = [s.raw().reshape(-1) for s, owner in zip(bucket.slots, self.owners, strict=True) if owner == place]
        padding = torch.zeros(max(lengths) - lengths[place], dtype=bucket.dtype, device=bucket.device)
        everyone = yield AllGather(torch.cat([*own, padding]), self.group)
        offsets = [0] * len(members)
        for slot, owner in zip(bucket.slots, self.owners, strict=True):
            slot.write(everyone[owner, offsets[owner] : offsets[owner] + slot.numel])
            offsets[owner] += slot.numel

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Return the seconds to fill the message, and to read all messages."""
        size = 4 * sum(map(math.prod, shapes))
        return [costs.compute_seconds("memory", 2 * size / topology.world_size), costs.compute_seconds("memory", size)]


def constant_decay(weight: float) -> Decay:
    """Return the same weight for every update; the first statistic is taken as it is."""
    return lambda updates: torch.full_like(updates, weight)


def warmup_decay(updates: Tensor) -> Tensor:
    """Return ``min(1 - 1/n, 0.95)`` at update n (Martens and Grosse 2015, section 5)."""
    return (1 - 1 / (updates + 1)).clamp(max=0.95)


def decay_of(decay: Any) -> Decay:
    """Return a decay function from a number in [0, 1] or "warmup"."""
    return warmup_decay if decay == "warmup" else constant_decay(float(decay))
