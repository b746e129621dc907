"""Lanes: one process group for each (purpose, scope, round), so that order within a group is the plan's order.

Groups are made where they are leased, in the same order on all ranks of the group, kept in a pool for the life of the
process, and given back on ``detach``: making a Gloo group opens a socket to every other rank.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.program.ops import Scope
from thinwire.program.topology import Topology

_pool: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
_pool_owner: weakref.ref[Any] | None = None


def _fresh_pool() -> None:
    """A pool belongs to one life of the default group; after ``destroy_process_group`` its groups are dead."""
    global _pool_owner
    world = dist.group.WORLD
    if _pool_owner is None or _pool_owner() is not world:
        _pool.clear()
        _pool_owner = weakref.ref(world) if world is not None else None


@dataclass(frozen=True)
class Lane:
    """One process group and the place of this rank in it."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks, ascending; an op's group ranks index this tuple."""
    rank: int
    """This rank's place in ``ranks``."""
    back: dist.ProcessGroup | None = None
    """A second group, for messages from a higher rank to a lower one; see ``swap.py``."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Lanes:
    """The lanes that one GradientSync has leased.

    Args:
        ranks: global ranks of the training group, in group order.
        topology: over ``len(ranks)`` ranks.
        rank: this rank's place in the group.
        timeout: of the collectives; None keeps torch's.
    """

    def __init__(self, ranks: tuple[int, ...], topology: Topology, rank: int, timeout: timedelta | None) -> None:
        self._ranks, self._topology, self._rank, self._timeout = ranks, topology, rank, timeout
        self._held: dict[tuple[str, Scope, int], Lane] = {}
        self._leases: list[tuple[tuple[Any, ...], dist.ProcessGroup]] = []

    def get(self, purpose: str, scope: Scope, round_: int, *, two_way: bool = False) -> Lane:
        """The lane of a round. The first request makes it: all ranks of the group must ask in the same order.

        ``two_way``: for messages between pairs of ranks, with a group for each direction.
        """
        key = (purpose, scope, round_)
        held = self._held.get(key)
        if held is None:
            members = self._topology.members(scope, self._rank)
            ranks = tuple(self._ranks[r] for r in members)
            held = self._held[key] = Lane(self._lease(ranks), ranks, members.index(self._rank))
        if two_way and held.back is None and held.size > 1:
            held = self._held[key] = replace(held, back=self._lease(held.ranks))
        return held

    def _lease(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        _fresh_pool()
        key = (ranks, self._timeout)
        free = _pool.setdefault(key, [])
        if free:
            group = free.pop(0)
        else:
            made = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            group = made
        self._leases.append((key, group))
        return group

    def release(self, *, broken: bool = False) -> None:
        """Give the groups back to the pool; ``broken`` ones (an error may have left ops in flight) are dropped."""
        if not broken:
            _fresh_pool()
            for key, group in self._leases:
                _pool.setdefault(key, []).append(group)
        self._leases.clear()
        self._held.clear()
