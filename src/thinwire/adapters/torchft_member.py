"""One replica under torchft, whatever it exchanges: the state it keeps, and which steps count.

A replica that gives up a step must be sure that the step counts for nobody, or that it will learn otherwise: a replica
votes when it has received everything, and steps when it has all votes. If a vote is lost, its sender keeps a step that
the others repeat without it. So members of a new quorum compare which step counted last, and in which quorum; the later
quorum is right.

Each quorum has its own store, and torchft configures a process group from it: the address is read there, and process
groups of our own are made of the same ranks. Only ``Quorums`` here uses torchft's private interface.

A replica may be a site of several ranks, over which FSDP2 has sharded the model: torchft then has a manager on each,
and a store for each place in the group, at which the ranks meet that hold the same shards at all sites.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor

from thinwire.adapters.fsdp2_sites import sharded_as
from thinwire.core.collectives.circle import Circle
from thinwire.core.program import Plan
from thinwire.core.program.bucket import local_shard
from thinwire.engine.local.rounds import Rounds
from thinwire.engine.local.site import WHOLE
from thinwire.engine.services import Closing
from thinwire.engine.stats import Stats

_KNOWN = (
    "_pg", "_timeout", "_use_async_quorum", "_group_world_size", "_quorum_id", "_replica_world_size_mode",
    "_user_state_dicts", "_quorum_future",
)  # fmt: skip
_KEY = "thinwire"  # of what the manager gives to joining replicas
_RUNS = 100
_EQUAL = ("shared", "outer", "step", "dropped", "commit", "runs")  # of a QuorumMemory, on all replicas
Attempt = tuple[int, int]
"""The manager's step and the quorum number of an exchange."""
logger = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Quorum:
    number: int  # torchft's, equal on all members
    store: str  # of this quorum, in torchft's form: ``host:port/prefix``
    rank: int  # of this member
    size: int


class Quorums:
    """The quorums of a manager. ``shards``: ranks that share a copy of the model; None: it is whole."""

    def __init__(self, manager: Any, shards: int | None = None) -> None:
        _check(manager, shards)
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

    def start(self) -> None:
        """Start a quorum, also after one that was late."""
        past = self.manager._quorum_future
        if past is not None and past.done() and past.exception() is not None:
            self.manager._quorum_future = None  # start_quorum would raise the same once more
        self.manager.start_quorum()

    def fall_behind(self) -> None:
        """Let the next quorum heal this replica from one that is ahead, since its last step does not count."""
        state = self.manager.state_dict()
        self.manager.load_state_dict({**state, "step": max(0, state["step"] - 1)})


def _check(manager: Any, shards: int | None) -> None:
    if not callable(getattr(manager, "start_quorum", None)):
        raise TypeError(f"manager must be a torchft.Manager, not {type(manager).__name__}")
    if missing := [name for name in _KNOWN if not hasattr(manager, name)]:
        raise RuntimeError(f"this torchft's Manager has no {missing[0]}: install torchft 0.2")
    if manager._use_async_quorum:
        raise ValueError(
            "the manager heals while its replica computes, with gradients that do not count: create it with "
            "Manager(use_async_quorum=False), so that a joining replica is healed before its step"
        )
    if manager._replica_world_size_mode.name != "DYNAMIC":
        raise ValueError(
            "spare replicas send zeros, which thinwire does not do: leave out Manager(world_size_mode=...)"
        )
    if _KEY in manager._user_state_dicts:
        raise ValueError("attach was called with this manager before: create a manager for each call")
    if manager._quorum_id != -1:
        raise ValueError("the manager has already had a quorum: call attach before the first start_quorum")
    count = manager._group_world_size
    if shards is None and count != 1:
        raise ValueError(
            f"the replica group has {count} processes, but thinwire supports only groups of one, or of the ranks over "
            "which fully_shard has sharded the model: start each process as its own replica group, with Manager(rank=0,"
            " world_size=1)"
        )
    if shards is not None and count != shards:
        raise ValueError(
            f"the model is sharded over {shards} ranks, but the replica group has {count}: a group is one site, so "
            f"create the manager with Manager(rank=dist.get_rank(), world_size={shards})"
        )


def enter(quorum: Quorum, timeout: timedelta) -> Circle:
    """Meet a quorum's members. All of them must call it."""
    address, _, prefix = quorum.store.partition("/")
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return Circle(store, f"{prefix}/thinwire", quorum.rank, quorum.size, timeout)


def told(numbers: list[int], circle: Circle) -> list[tuple[int, ...]]:
    """Exchange numbers: each member passes equally many, and all get those of every member, by rank."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(circle.whole.size())]
    dist.all_gather(everyone, mine, group=circle.whole)
    return [tuple(row.tolist()) for row in everyone]


@dataclass
class QuorumMemory:
    """State after the last step that counted, for the next quorum; all but ``own`` is equal on all replicas."""

    own: dict[str, Any] = field(default_factory=lambda: {"residual": {}, "offset": {}, "local": {}})
    shared: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the method's fields
    outer: dict[str, Any] = field(default_factory=dict)  # of local steps
    step: int = 0  # of the method's state, as ``dropped``
    dropped: int = 0
    plan: Plan | None = None  # None: none was made for several replicas
    commit: Attempt | None = None  # the last exchange that counted
    runs: list[Attempt] = field(default_factory=list)  # the first that counted of each quorum, the last hundred

    def keep(self, snapshot: Mapping[str, Any]) -> None:
        """Keep a method's state. Its counters may be those of a step that does not count."""
        self.own = {kind: snapshot[kind] for kind in ("residual", "offset", "local")}
        self.shared = snapshot["shared"]

    def keep_rounds(self, rounds: Rounds) -> None:
        clock = rounds.snapshot()
        [fragment] = clock.pop("fragments")
        codec = fragment.pop("codec")
        self.keep(codec)
        self.step, self.dropped = codec["step"], codec["dropped"]
        self.outer = {"clock": clock, "fragment": fragment}

    def restore_rounds(self, rounds: Rounds) -> None:
        rounds.restore({**self.outer["clock"], "fragments": [{**self.outer["fragment"], "codec": self.state()}]})

    def state(self) -> dict[str, Any]:
        return {**self.own, "shared": self.shared, "step": self.step, "dropped": self.dropped}

    def counts(self, attempt: Attempt) -> None:
        if not self.runs or self.runs[-1][1] != attempt[1]:
            self.runs = [*self.runs[-_RUNS:], attempt]
        self.commit = attempt

    def counted(self, attempt: Attempt) -> bool:
        step, quorum = attempt
        run = [number for first, number in self.runs if first <= step][-1:]
        return self.commit is not None and step <= self.commit[0] and run == [quorum]

    def shared_part(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _EQUAL}
        return {**plain, "plan": self.plan.to_json() if self.plan else None}

    @classmethod
    def of_shared_part(cls, saved: Mapping[str, Any]) -> QuorumMemory:
        made = cls(**{name: saved[name] for name in _EQUAL})
        made.plan = Plan.from_json(saved["plan"]) if saved["plan"] else None
        return made


@dataclass
class Losses:
    """Residuals that are lost: with members of earlier quorums that are gone, or discarded here (their norm)."""

    identity: int = field(default_factory=lambda: secrets.randbits(62))
    members: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    norm: float = 0.0

    def meet(self, members: set[int]) -> None:
        self.gone = (self.gone | self.members) - members
        self.members = members

    def forget(self, residuals: Mapping[str, Tensor]) -> None:
        self.norm += sum(float(x.norm()) ** 2 for x in residuals.values()) ** 0.5


class QuorumMember:
    """``place``: which shards of the model this rank has, as of a ``Site``."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], quorums: Quorums, place: str = WHOLE
    ) -> None:
        self.model, self.optimizers, self.quorums, self.place = model, list(optimizers), quorums, place
        self.memory, self.losses = QuorumMemory(), Losses()
        self.met: Quorum | None = None  # the last one to whose members it connected
        self.circle: Circle | None = None  # of its members
        self.attempt: Attempt | None = None

    def begins(self, quorum: Quorum) -> None:
        self.attempt = (self.quorums.manager.current_step(), quorum.number)

    def meet(self, quorum: Quorum) -> None:
        self.met = quorum
        self.circle = enter(quorum, self.quorums.timeout)
        step, number = self.memory.commit or (-1, -1)
        mine = (step, number, self.losses.identity)
        everyone = told(list(mine), self.circle)
        self.losses.meet({row[2] for row in everyone})
        latest = max(row[:2] for row in everyone)
        if latest != mine[:2]:
            self.quorums.fall_behind()
        if any(row[:2] != latest for row in everyone):
            raise RuntimeError("a replica has kept a step that the others have repeated without it: it will be healed")

    def failed(self, error: Exception) -> None:
        logger.warning("thinwire: the step does not count: %s", error)
        self.quorums.manager.report_error(error)
        self.leave()

    def leave(self) -> None:
        """Destroy the groups, if there are any. Members that still wait for this one notice it."""
        circle, self.circle = self.circle, None
        if circle is not None:
            circle.close()

    def give(self) -> dict[str, Any]:
        """Return the state that the manager gives to joining replicas; ``memory`` must be up to date."""
        own = {"model": _here_of(self.model.state_dict()), "optimizers": [_given(o) for o in self.optimizers]}
        return own | {"place": self.place} | self.memory.shared_part()

    def take(self, saved: Mapping[str, Any]) -> None:
        """Load it after joining or falling behind. This replica's residuals are kept if its last step counts."""
        self._check_alike(saved)
        theirs, memory = QuorumMemory.of_shared_part(saved), self.memory
        if memory.commit is not None and not theirs.counted(memory.commit):
            self.losses.forget(memory.own["residual"])
        else:
            theirs.own = memory.own
        own = self.model.state_dict()
        self.model.load_state_dict({name: _as_in(own.get(name), x) for name, x in saved["model"].items()})
        for optimizer, one in zip(self.optimizers, saved["optimizers"], strict=True):
            _load(optimizer, one)
        self.memory = theirs

    def _check_alike(self, saved: Mapping[str, Any]) -> None:
        if saved["place"] != self.place:
            raise ValueError(
                f"the replicas are sharded differently, this one {self.place}, that which it is to go on from "
                f"{saved['place']}: start all sites with the same number of ranks"
            )
        own, theirs = _shapes(self.model.state_dict()), _shapes(saved["model"])
        if differ := sorted(own.items() ^ theirs.items()):
            raise ValueError(f"the model differs from that of the replica that it is to go on from: see {differ[0][0]}")
        if len(saved["optimizers"]) != len(self.optimizers):
            raise ValueError("the replica that this one is to go on from has another number of optimizers")

    def counted_without(self, saved: Mapping[str, Any]) -> bool:
        return self.attempt is not None and QuorumMemory.of_shared_part(saved).counted(self.attempt)

    def told_of(self, stats: Stats, *, residual: bool) -> Stats:
        lost = None if self.losses.gone and residual else self.losses.norm
        return dataclasses.replace(stats, lost_residual_norm=lost)


def _here_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which each tensor is what this rank holds of it."""
    return {name: local_shard(x) if isinstance(x, Tensor) else x for name, x in named.items()}


def _shapes(named: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(local_shard(x).shape) for name, x in named.items() if isinstance(x, Tensor)}


def _as_in(own: Any, x: Any) -> Any:
    """Return what this rank holds of a tensor as a part of one sharded as ``own``, if that is sharded."""
    fits = isinstance(own, DTensor) and isinstance(x, Tensor) and x.shape == local_shard(own).shape
    return sharded_as(own, x) if fits else x


def _given(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    saved = optimizer.state_dict()
    return {**saved, "state": {place: _here_of(one) for place, one in saved["state"].items()}}


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    states = {k: {name: _as_in(own[k], x) for name, x in one.items()} for k, one in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": states})


class QuorumHandle(Closing):
    """The handle that ``attach`` returns: hooks in model and optimizers, and what they call, until ``close``."""

    def __init__(self, member: QuorumMember) -> None:
        self._member = member
        self._handles: list[Any] = [o.register_step_post_hook(self._stepped) for o in member.optimizers]
        for module in member.model.modules():
            if module is member.model or any(True for _ in module.parameters(recurse=False)):
                # before FSDP2's, which gathers what a round will change
                self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
        member.quorums.manager.register_state_dict_fn(_KEY, self._take, self._give)

    @abstractmethod
    def _enter(self, module: nn.Module, args: Any) -> None: ...  # a forward starts

    @abstractmethod
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None: ...

    @abstractmethod
    def _give(self) -> dict[str, Any]: ...  # to joining replicas

    @abstractmethod
    def _take(self, saved: dict[str, Any]) -> None: ...  # after joining or falling behind

    @abstractmethod
    def _leave(self) -> None: ...  # keep the state that counts, and return the communicator

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the model's gradients by their global norm. Return the norm."""
        parameters = self._member.model.parameters()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @property
    def quorum(self) -> Quorum | None:
        """The quorum whose members exchange; None: there was none yet."""
        return self._member.met

    def close(self) -> None:
        """Remove the hooks and return the communicator. Idempotent; shutting down the manager is left to the caller."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()


def added(past: Stats, now: Stats) -> Stats:
    names = ("rejected_steps", "dropped_steps", "bytes_sent", "dense_bytes", "exposed_seconds")
    return dataclasses.replace(now, **{name: getattr(past, name) + getattr(now, name) for name in names})
