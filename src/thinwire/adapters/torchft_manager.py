"""What a torchft Manager knows of its quorum. The only file that uses its private interface.

Each quorum has its own store, and torchft configures a process group from it: the address is read there, and torch's
default process group is made of the same ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_KNOWN = ("_pg", "_timeout", "_use_async_quorum", "_group_world_size", "_quorum_id", "_replica_world_size_mode")


@dataclass(frozen=True)
class Quorum:
    """The members until the next quorum.

    Attributes:
        number: torchft's number, equal on all members.
        store: address and prefix of its store, in torchft's form: ``host:port/prefix``.
        rank: rank of this member. size: number of members.
    """

    number: int
    store: str
    rank: int
    size: int


class Quorums:
    """The quorums of one manager, which must not have had any yet.

    Attributes:
        manager: the manager.
        latest: the current quorum; None: there was none yet.
        timeout: time-out of the manager.
    """

    def __init__(self, manager: Any) -> None:
        _check(manager)
        self.manager = manager
        self.timeout: timedelta = manager._timeout
        self.latest: Quorum | None = None
        group = manager._pg
        configure = group.configure

        @functools.wraps(configure)
        def heard(store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any, **kwargs: Any) -> None:
            self.latest = None
            configure(store_addr, replica_id, rank, world_size, *args, **kwargs)
            self.latest = Quorum(manager._quorum_id, store_addr, rank, world_size)

        group.configure = heard

    def fall_behind(self) -> None:
        """Let the next quorum heal this replica from one that is ahead, since its last step does not count."""
        state = self.manager.state_dict()
        self.manager.load_state_dict({**state, "step": max(0, state["step"] - 1)})


def _check(manager: Any) -> None:
    """Refuse an object that is no manager, or a manager that is not supported."""
    if not callable(getattr(manager, "start_quorum", None)):
        raise TypeError(f"manager must be a torchft.Manager, not {type(manager).__name__}")
    if missing := [name for name in _KNOWN if not hasattr(manager, name)]:
        raise RuntimeError(f"this torchft's Manager has no {missing[0]}: install torchft 0.2")
    if manager._use_async_quorum:
        raise ValueError(
            "the manager heals while its replica computes, with gradients that do not count: create it with "
            "Manager(use_async_quorum=False), so that a joining replica is healed before its step"
        )
    if manager._group_world_size != 1:
        raise ValueError(
            f"the replica group has {manager._group_world_size} processes, but thinwire supports only groups of one: "
            "start each process as its own replica group, with Manager(rank=0, world_size=1)"
        )
    if manager._replica_world_size_mode.name != "DYNAMIC":
        raise ValueError(
            "spare replicas send zeros, which thinwire does not do: leave out Manager(world_size_mode=...)"
        )
    if manager._quorum_id != -1:
        raise ValueError("the manager has already had a quorum: call attach before the first start_quorum")
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed has a default process group, which thinwire creates anew for each quorum: leave out "
            "init_process_group; the manager needs only a TCPStore"
        )


def enter(quorum: Quorum, timeout: timedelta) -> None:
    """Make torch's default process group of a quorum's members. All of them must call it.

    Raises:
        RuntimeError: some member did not connect within ``timeout``.
    """
    address, _, prefix = quorum.store.partition("/")
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"{prefix}/thinwire", store),
        rank=quorum.rank,
        world_size=quorum.size,
        timeout=timeout,
    )


def told(numbers: list[int]) -> list[tuple[int, ...]]:
    """Exchange numbers: each member passes equally many, and all get those of every member, by rank."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [tuple(row.tolist()) for row in everyone]


def leave() -> None:
    """Destroy the default process group, if there is one. Members that still wait for this one notice it."""
    if dist.is_initialized():
        dist.destroy_process_group()
