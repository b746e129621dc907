"""Process groups under names of our own: among a job's ranks, or among ranks that have met at a store.

torch's ``new_group`` names a group of some ranks by how many groups this rank is in, so ranks that are in different
numbers of them never meet. And it makes groups from the ranks of the default group only, and ends them all with it.
Where ranks come and go while others train on, the exchange needs groups that do not depend on it: the default one may
be that of a site's shards. Only this file uses torch's private interface for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store


class Circle:
    """Ranks that have met at a store; all of them make the same groups, in the same order. On Gloo only.

    ``whole``: the group of all. ``name``: equal on all of them, and no other open circle's.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._name, self._rank, self.open = store, name, rank, True
        self._groups: list[dist.ProcessGroup] = []
        self.whole = self.group(range(size), timeout)
        _circles[self.whole] = self

    def group(self, ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
        """Make a group of some of the ranks, of which this is one."""
        name, places = f"{self._name}/{len(self._groups)}", {rank: place for place, rank in enumerate(ranks)}
        made = _made(places, self._rank, [], "gloo", self._store, name, timeout)
        mine = dist.get_rank() if dist.is_initialized() else self._rank  # torch looks it up to log an error
        c10d._world.pg_group_ranks[made].setdefault(mine, places[self._rank])
        self._groups.append(made)
        return made

    def close(self) -> None:
        """Destroy the groups: who still waits for one notices it. Idempotent."""
        self.open = False
        _circles.pop(self.whole, None)
        for group in self._groups:
            if group in c10d._world.pg_map:  # not if the default group was destroyed meanwhile
                dist.destroy_process_group(group)
        self._groups.clear()


def group_named(
    name: str, ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group of some of the default group's ranks, ascending; they alone call it. ``backend``: None: as that."""
    default = dist.distributed_c10d._get_default_group()
    known, store = c10d._world.pg_map[default]
    places = {rank: place for place, rank in enumerate(ranks)}
    return _made(places, default.rank(), list(ranks), backend or known, store, name, timeout)


def _made(
    places: dict[int, int],
    rank: int,
    of_default: list[int],
    backend: str,
    store: Store,
    name: str,
    timeout: timedelta | None,
) -> dist.ProcessGroup:
    """``of_default``: the ranks by the default group's numbers; empty: the group does not depend on it."""
    device = dist.distributed_c10d._get_default_group().bound_device_id if of_default else None
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(places), places[rank], of_default, c10d.Backend(backend), store, name,  # type: ignore[arg-type,unused-ignore]
        timeout=timeout or c10d._get_default_timeout(c10d.Backend(backend)), device_id=device,
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = dict(places)
    return made


_circles: weakref.WeakKeyDictionary[dist.ProcessGroup, Circle] = weakref.WeakKeyDictionary()


def circle_of(group: dist.ProcessGroup | None) -> Circle | None:
    """Return the open circle whose group this is; None: it was made from the default group."""
    return None if group is None else _circles.get(group)


def place_in(group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], int]:
    """Return the ranks of a group (None: the default one) by torch's numbers, and this one's place among them."""
    if group is not None and circle_of(group) is not None:
        return tuple(range(group.size())), group.rank()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)), dist.get_rank(group)
