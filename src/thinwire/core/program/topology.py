"""Which rank is on which machine, and the groups that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from thinwire.core.program.ops import Scope


@dataclass(frozen=True)
class Topology:
    """The assignment of ranks to machines.

    Args:
        ranks_per_node: one number for all machines, or one per machine (they must add up to ``world_size``); None puts
            every rank on a machine of its own. Ranks are numbered machine by machine, as torchrun does.
    """

    world_size: int
    ranks_per_node: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, Integral) or self.world_size < 1:
            raise ValueError(f"world_size must be a whole number of at least 1, not {self.world_size!r}")
        layout = self.ranks_per_node
        if layout is None:
            layout = 1
        if isinstance(layout, int):
            if layout < 1 or self.world_size % layout:
                raise ValueError(
                    f"{self.world_size} ranks cannot be placed {layout} per node; give one number per node, "
                    "for example ranks_per_node=[4, 3]"
                )
            layout = [layout] * (self.world_size // layout)
        if sum(layout) != self.world_size or min(layout) < 1:
            raise ValueError(f"ranks_per_node {list(layout)} must be positive and add up to {self.world_size}")
        object.__setattr__(self, "ranks_per_node", tuple(layout))

    @property
    def layout(self) -> tuple[int, ...]:
        """Number of ranks on each machine."""
        assert isinstance(self.ranks_per_node, tuple)
        return self.ranks_per_node

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return len(self.layout)

    @property
    def two_levels(self) -> bool:
        """Whether there are several machines, and several ranks on one of them."""
        return self.nodes > 1 and max(self.layout) > 1

    @property
    def uniform(self) -> bool:
        """Whether every machine holds the same number of ranks."""
        return len(set(self.layout)) == 1

    def node_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(i for i, end in enumerate(itertools.accumulate(self.layout)) if rank < end)

    def local_rank(self, rank: int) -> int:
        """Return the rank's number within its machine."""
        return rank - sum(self.layout[: self.node_of(rank)])

    def members(self, scope: Scope, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group instance of ``scope`` that ``rank`` belongs to, ascending."""
        starts = list(itertools.accumulate(self.layout, initial=0))
        if scope is Scope.WORLD:
            return tuple(range(self.world_size))
        if scope is Scope.NODE:
            node = self.node_of(rank)
            return tuple(range(starts[node], starts[node + 1]))
        local = self.local_rank(rank)
        return tuple(starts[i] + local for i, count in enumerate(self.layout) if local < count)
