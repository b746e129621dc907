"""Lanes: one process group for each (purpose, scope, round), so that order within a group is the plan's order.

Groups are made when they are leased, in the same order on all ranks of the group. They are kept in a pool for the life
of the process, and given back on ``close``. Making a Gloo group opens a socket to every other rank, and its thread
wakes 100 times a second even if idle. So a lane whose mesh carries everything that it sends has no group of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import thinwire.core.collectives.rest  # noqa: F401  # for its part in the process's end
from thinwire.core.collectives.bounded import bounded, seconds_of
from thinwire.core.collectives.mesh import Mesh, open_mesh
from thinwire.core.program.ops import Scope
from thinwire.core.program.topology import Topology

_STORE_SECONDS = 2.0
_pool: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
meshes: dict[tuple[Any, ...], list[Mesh]] = {}
unreachable: set[tuple[Any, ...]] = set()  # ranks that cannot connect directly: tried once, not once per lane
_pool_owner: weakref.ref[Any] | None = None


def _fresh_pool() -> None:
    """Empty the pool if the default group has changed: after ``destroy_process_group`` its groups are dead."""
    global _pool_owner
    world = dist.group.WORLD
    if _pool_owner is None or _pool_owner() is not world:
        _pool.clear()
        for mesh in (mesh for free in meshes.values() for mesh in free):
            mesh.close()
        meshes.clear()
        unreachable.clear()
        _pool_owner = weakref.ref(world) if world is not None else None


@dataclass(frozen=True)
class Lane:
    """A process group, and this rank's place in it."""

    group: dist.ProcessGroup
    """The lane's own group, unless ``mesh_only``."""
    ranks: tuple[int, ...]
    """Global ranks, ascending; an op's group ranks index this tuple."""
    rank: int
    """This rank's place in ``ranks``."""
    mesh: Mesh | None = None
    """thinwire's own connections between all pairs of ranks, for messages from and to CPUs."""
    back: dist.ProcessGroup | None = None
    """Without a mesh, a second group for messages from a higher rank to a lower one (``pairwise_work.py``)."""

    mesh_only: bool = False
    """Whether the mesh carries everything; ``group`` is then another lane's, with which the mesh was made."""
    disjoint: bool = True
    """Whether no two of its ranks share a link; see `disjoint_links`."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks' places, the next one first, so that each rank starts with a different peer."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def disjoint_links(topology: Topology) -> bool:
    """Return whether messages between all pairs of ranks put no more load on any link than a ring of them."""
    return topology.world_size == 2 or not topology.two_levels


class Lanes:
    """The lanes that one GradientSync has leased.

    Args:
        ranks: global ranks of the training group, in group order.
        topology: over ``len(ranks)`` ranks.
        rank: this rank's place in the group.
        timeout: of the collectives; None keeps torch's.
        device: of NCCL's tensors. With NCCL, one group serves all lanes over the same ranks: one thread issues ops in
            the plan's order, each group costs GPU memory, and groups must not be used in different orders.
        backend: what ``new_group`` is given; None: it takes the default group's.
        come: waits until all ranks have come to make the same lane, or raises ``RuntimeError``.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        topology: Topology,
        rank: int,
        timeout: timedelta | None,
        device: torch.device | None = None,
        backend: str | None = None,
        come: Callable[[], None] = lambda: None,
    ) -> None:
        self._come = come
        self._ranks, self._topology, self._rank, self._timeout = ranks, topology, rank, timeout
        self._device, self._backend = device, backend
        self._held: dict[tuple[str, Scope, int], Lane] = {}
        self._leases: list[tuple[tuple[Any, ...], dist.ProcessGroup]] = []
        self._leased_meshes: list[tuple[tuple[Any, ...], Mesh]] = []
        self._first: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def get(
        self, purpose: str, scope: Scope, round_: int, *, bidirectional: bool = False, mesh_only: bool = False
    ) -> Lane:
        """Return the lane of a round. The first request makes it: all ranks of the group must ask in the same order.

        ``bidirectional``: for messages between pairs of ranks: with a mesh or, without one, a group for each direction.
        ``mesh_only``: with a mesh that carries all ops (of CPU tensors) or, without one, as with ``bidirectional``.
        """
        key = (purpose, scope, round_)
        held = self._held.get(key)
        if held is None:
            self._come()
            held = self._held[key] = self._make(scope, mesh_only)
        if (bidirectional or mesh_only) and held.size > 1 and held.mesh is None and held.back is None:
            mesh = self._lease_mesh(held.group, held.ranks, held.rank)
            held = replace(held, mesh=mesh, back=self._lease(held.ranks) if mesh is None else None)
            self._held[key] = held
        return held

    def _make(self, scope: Scope, mesh_only: bool) -> Lane:
        members = self._topology.members(scope, self._rank)
        ranks, place = tuple(self._ranks[r] for r in members), members.index(self._rank)
        disjoint = disjoint_links(self._topology)
        if self._device is not None and ranks in self._first:
            return Lane(self._first[ranks], ranks, place, disjoint=disjoint)
        meeting = self._first.get(ranks) if mesh_only and disjoint and len(ranks) > 1 else None
        if meeting is not None and (mesh := self._lease_mesh(meeting, ranks, place)) is not None:
            return Lane(meeting, ranks, place, mesh, mesh_only=True, disjoint=disjoint)
        return Lane(self._lease(ranks), ranks, place, disjoint=disjoint)

    def _lease_mesh(self, group: dist.ProcessGroup, ranks: tuple[int, ...], place: int) -> Mesh | None:
        if self._device is not None:  # NCCL's messages take no sockets of ours
            return None
        _fresh_pool()
        key = (ranks, self._timeout, self._backend)
        free = meshes.setdefault(key, [])
        if free:
            mesh: Mesh | None = free.pop(0)
        elif key in unreachable:
            return None
        else:
            mesh = open_mesh(group, ranks, place, self._timeout)
        if mesh is None:
            unreachable.add(key)
        else:
            self._leased_meshes.append((key, mesh))
        return mesh

    def _lease(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        _fresh_pool()
        # A group that CPUs have used may have an NCCL that has not connected yet.
        key = (ranks, self._timeout, self._backend, self._device)
        free = _pool.setdefault(key, [])
        if free:
            group = free.pop(0)
        else:
            made = bounded(
                seconds_of(self._timeout)
                + _STORE_SECONDS,  # it fails by its own limit, unless the process that holds the store is frozen
                lambda: dist.new_group(
                    list(ranks), timeout=self._timeout, backend=self._backend, use_local_synchronization=True
                ),
            )
            assert isinstance(made, dist.ProcessGroup)
            group = made
            if self._device is not None:  # NCCL connects at the first op, in which all ranks must take part
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._leases.append((key, group))
        self._first.setdefault(ranks, group)
        return group

    def release(self, *, broken: bool = False) -> None:
        """Give the groups back to the pool; ``broken`` ones (an error may have left ops in flight) are dropped."""
        _fresh_pool()
        for key, mesh in self._leased_meshes:
            if broken:
                mesh.close()
            else:
                meshes.setdefault(key, []).append(mesh)
        if not broken:
            for key, group in self._leases:
                _pool.setdefault(key, []).append(group)
        self._leases.clear()
        self._leased_meshes.clear()
        self._held.clear()
        self._first.clear()
