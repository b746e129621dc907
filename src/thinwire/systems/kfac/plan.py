"""A K-FAC plan: which factors share a message, who inverts what, who preconditions. Plain data, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.core.kernels.symmetric import packed_size
from thinwire.core.program import CROSS, NODE, WORLD, Scope, Topology
from thinwire.core.records import Record

TRANSPORTS = ("broadcast", "owner_fused", "allgather")
"""How inverses are sent: one message per inverse, one per owner, or one for all."""


@dataclass(frozen=True)
class FactorLayer:
    """One layer's sizes: A is ``d_a x d_a``, G is ``d_g x d_g``, with ``itemsize`` bytes per element."""

    name: str
    d_a: int
    d_g: int
    itemsize: int = 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.itemsize == 8 else torch.float32

    def packed(self, side: int) -> int:
        """Return the elements sent of one factor's statistic: its triangle, and its count."""
        return packed_size((self.d_a, self.d_g)[side]) + 1


@dataclass(frozen=True)
class InverseMessage:
    """Items (see ``KFACPlan.owners``) sent together, by one rank or (``owner`` None) by all ranks of a group."""

    owner: int | None
    items: tuple[int, ...]


@dataclass(frozen=True)
class KFACPlan(Record):
    """Everything about K-FAC that ranks must agree on; ``to_json`` and ``from_json`` keep it in a file.

    Attributes:
        layers: in forward order. schedule, method: as in ``Variant`` and ``KFAC``.
        a_buckets, g_buckets: indices of layers that share a message: A in forward order, G in backward order.
        overlap: messages are sent during the passes; False: in the step, after the gradients (always on CUDA).
        exchange: factors are averaged over the ranks; False: their owner uses only its own batch.
        workers: number of ranks that precondition each layer; if not all, ranks form groups of neighbours.
        owners: who inverts item ``2 i`` (A of layer i) and ``2 i + 1`` (G); -1: every rank that needs it.
        transport: one of ``TRANSPORTS``.
        wire_dtype: of the statistics, "fp32" (as they are) or "bf16".
    """

    called: ClassVar[str] = "a K-FAC plan"

    layers: tuple[FactorLayer, ...]
    world_size: int
    schedule: str
    method: str
    a_buckets: tuple[tuple[int, ...], ...]
    g_buckets: tuple[tuple[int, ...], ...]
    overlap: bool
    exchange: bool
    workers: int
    owners: tuple[int, ...]
    transport: str = "broadcast"
    wire_dtype: str = "fp32"

    @property
    def topology(self) -> Topology:
        """Groups of ranks that precondition the same layers, as if each were a machine."""
        return Topology(self.world_size, self.workers)

    def dim(self, item: int) -> int:
        layer = self.layers[item // 2]
        return layer.d_g if item % 2 else layer.d_a

    def factor(self, item: int) -> str:
        return f"{self.layers[item // 2].name}/{'AG'[item % 2]}"

    def elements(self, item: int) -> int:
        """Return an inverse's elements as sent: its triangle and level, or eigenvectors, eigenvalues and level."""
        d = self.dim(item)
        return d * d + d + 1 if self.method == "eigen" else packed_size(d) + 1

    def group_of(self, layer: int) -> int:
        """Return which group of ranks preconditions a layer; 0 if every rank does."""
        owner = max(self.owners[2 * layer], self.owners[2 * layer + 1])
        return owner // self.workers if owner >= 0 and self.workers < self.world_size else 0

    def mine(self, layer: int, rank: int) -> bool:
        return self.workers == self.world_size or self.group_of(layer) == rank // self.workers

    def messages(self, group: int = 0) -> tuple[InverseMessage, ...]:
        """Return the inverses that a group sends, in order. A group of one rank sends none."""
        items = [i for i, owner in enumerate(self.owners) if owner >= 0 and owner // self.workers == group]
        if self.workers == 1 or not items:
            return ()
        if self.transport == "broadcast":
            return tuple(InverseMessage(self.owners[i], (i,)) for i in items)
        made: dict[tuple[int, int], list[int]] = {}
        for i in items:  # each message has one dtype
            owner = -1 if self.transport == "allgather" else self.owners[i]
            made.setdefault((self.layers[i // 2].itemsize, owner), []).append(i)
        return tuple(InverseMessage(None if o < 0 else o, tuple(made[size, o])) for size, o in sorted(made))

    def returns(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return (group, its layers) for each message of preconditioned gradients to the other groups."""
        if self.workers == self.world_size:
            return ()
        made: dict[tuple[int, int], list[int]] = {}
        for i, layer in enumerate(self.layers):
            made.setdefault((self.group_of(i), layer.itemsize), []).append(i)
        return tuple((group, tuple(layers)) for (group, _), layers in sorted(made.items()))

    def depth(self) -> dict[Scope, int]:
        """Return the exchanges of one program within each scope: the lanes that a channel must open."""
        sizes = {WORLD: self.world_size if self.exchange else 1, NODE: self.workers}
        sizes[CROSS] = self.world_size // self.workers
        return {scope: 1 for scope, size in sizes.items() if size > 1}

    def check(self, layers: tuple[FactorLayer, ...], world_size: int, **options: Any) -> None:
        """Raise ``ValueError``, listing what differs, unless the plan is for these layers, ranks and options."""
        wrong = []
        for name, wanted in {"layers": layers, "world_size": world_size, **options}.items():
            have = getattr(self, name)
            if have != wanted:
                wrong.append(f"{name}: {_short(have)} in the plan, {_short(wanted)} here")
        covered = [sorted(i for bucket in buckets for i in bucket) for buckets in (self.a_buckets, self.g_buckets)]
        if self.exchange and any(found != list(range(len(self.layers))) for found in covered):
            wrong.append("a_buckets and g_buckets: must hold every layer once")
        if len(self.owners) != 2 * len(self.layers) or not all(-1 <= o < self.world_size for o in self.owners):
            wrong.append("owners: must be a rank or -1 for A and G of every layer")
        if self.transport not in TRANSPORTS:
            wrong.append(f"transport: {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if wrong:
            raise ValueError(f"the K-FAC plan does not fit: {'; '.join(wrong)}")


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], FactorLayer):
        return f"{len(value)} ({value[0].name} {value[0].d_a}x{value[0].d_g}, ...)"
    return repr(value)
