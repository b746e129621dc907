"""One op of a program, on real ranks: the lane it goes over, the messages it becomes, and the count of what was sent.

A *lane* is a process group for each (purpose, scope, round), so that order within a group is the plan's order. Groups
are made when they are leased, in the same order on all ranks of the group. They are kept in a pool for the life of the
process, and given back on ``close``. Making a Gloo group opens a socket to every other rank, and its thread wakes 100
times a second even if idle. So a lane whose mesh carries everything that it sends has no group of its own.

On Gloo a reduce-scatter is an all-to-all and a sum in rank order. This sends half the bytes of Gloo's own, which is a
whole all-reduce and a slice. The all-to-all consists of messages between pairs. Up to a certain number of ranks,
all-reduces and all-gathers do so too: as many bytes as in Gloo's ring, in two turns or one, and no rank has to be awake
to pass others' bytes on.

Messages between pairs go over the lane's mesh. Without one, on Gloo, receives are posted before sends. In the other
order, the note "ready to receive" queues behind this rank's own data. If ranks are skewed, the two directions of the
link then take turns: twice the time (8 MiB each way at 100 Mbit/s, 20 ms of skew: 1.42 s against 0.73 s). torch's
``all_to_all_single`` has the same fault, so ours is made of these messages. For the same reason a lane without a mesh
has a second group: if messages go up one connection and down the other, the note for the next bucket does not queue
behind the data of this one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.circle import circle_of, group_named
from thinwire.core.collectives.groups import backend_of_new, backends_of, bounded, seconds_of
from thinwire.core.collectives.meeting import open_mesh
from thinwire.core.collectives.mesh import Mesh, ordered_sum
from thinwire.core.collectives.socket_stream import CountdownWork
from thinwire.core.program import Topology
from thinwire.core.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    ReduceScatter,
    Scope,
    sent_bytes,
)
from thinwire.core.sockets import MESH_RANKS
from thinwire.core.tcp_info import Wire

_STORE_SECONDS = 2.0
_pool: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
meshes: dict[tuple[Any, ...], list[Mesh]] = {}
bundled: dict[tuple[Any, ...], Mesh] = {}  # meshes whose sockets others of the same ranks share
unreachable: set[tuple[Any, ...]] = set()  # ranks that cannot connect directly: tried once, not once per lane
_pool_owner: weakref.ref[Any] | None = None
_tried: Counter[tuple[int, ...]] = Counter()  # how many groups of the same ranks this process has tried to make


def _fresh_pool() -> None:
    """Empty the pool if the default group has changed: after ``destroy_process_group`` its groups are dead.

    Drop what closed circles have left: of every key, the last is the circle of its ranks, or None.
    """
    global _pool_owner
    world, owner = dist.group.WORLD, _pool_owner
    changed = owner is not None if world is None else owner is None or owner() is not world
    for key in {*_pool, *meshes, *bundled, *unreachable}:
        if changed or (key[-1] is not None and not key[-1].open):
            for mesh in meshes.pop(key, []):
                mesh.close()
            _pool.pop(key, None)
            bundled.pop(key, None)
            unreachable.discard(key)
    if changed:
        _pool_owner = weakref.ref(world) if world is not None else None
        _tried.clear()


def long_wire(ranks: tuple[int, ...]) -> Wire | None:
    """Return what the longest wire between these ranks is like, as this one has seen it; None: none is long."""
    return next((mesh.wire() for key, mesh in bundled.items() if key[0] == ranks), None)


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
    """Without a mesh, a second group for messages from a higher rank to a lower one."""

    mesh_only: bool = False
    """Whether the mesh carries everything; ``group`` is then another lane's, with which the mesh was made."""
    disjoint: bool = True
    """Whether no two of its ranks share a link; see `disjoint_links`."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def backends(self) -> dict[str, str]:
        return backends_of(self.group)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks' places, the next one first, so that each rank starts with a different peer."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def disjoint_links(topology: Topology) -> bool:
    """Return whether messages between all pairs of ranks put no more load on any link than a ring of them."""
    return topology.world_size == 2 or not topology.two_levels


class LanePool:
    """The lanes that one GradientSync has leased; ``rank`` is this rank's place among the global ``ranks``.

    With NCCL one group serves all lanes over the same ranks: one thread issues ops in the plan's order, each group
    costs GPU memory, and groups must not be used in different orders. ``group``: of all these ranks, with the backends
    that the lanes get. ``come`` waits until all ranks have come to make the same lane, or raises ``RuntimeError``.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        topology: Topology,
        rank: int,
        timeout: timedelta | None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        come: Callable[[], None] = lambda: None,
    ) -> None:
        self._come, self._circle = come, circle_of(group)
        self._backend = backend_of_new(group) if group is not None and self._circle is None else None
        self._ranks, self._topology, self._rank, self._timeout = ranks, topology, rank, timeout
        self._device = device
        self._held: dict[tuple[str, Scope, int], Lane] = {}
        self._leases: list[tuple[tuple[Any, ...], dist.ProcessGroup]] = []
        self._leased_meshes: list[tuple[tuple[Any, ...], Mesh]] = []
        self._first: dict[tuple[int, ...], dist.ProcessGroup] = {}
        _fresh_pool()
        self._owner = _pool_owner

    def get(
        self, purpose: str, scope: Scope, round_: int, *, bidirectional: bool = False, mesh_only: bool = False
    ) -> Lane:
        """Return the lane of a round. The first request makes it: all ranks of the group must ask in the same order.

        Without a mesh, ``bidirectional`` (messages between pairs) and ``mesh_only`` (all ops) get a group for each
        direction.
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
        key = (ranks, self._timeout, self._backend, self._circle)
        free = meshes.setdefault(key, [])
        if free:
            mesh: Mesh | None = free.pop(0)
        elif key in bundled:
            mesh = bundled[key].another()
        elif key in unreachable:
            return None
        else:
            mesh = open_mesh(group, ranks, place, self._timeout)
            if mesh is not None and mesh.shared:
                bundled[key] = mesh
        if mesh is None:
            unreachable.add(key)
        else:
            self._leased_meshes.append((key, mesh))
        return mesh

    def _lease(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        _fresh_pool()
        # A group that CPUs have used may have an NCCL that has not connected yet.
        key = (ranks, self._timeout, self._backend, self._device, self._circle)
        free = _pool.setdefault(key, [])
        if free:
            group = free.pop(0)
        else:
            made = bounded(
                seconds_of(self._timeout)
                + _STORE_SECONDS,  # it fails by its own limit, unless the process that holds the store is frozen
                lambda: self._new_group(ranks),
            )
            assert isinstance(made, dist.ProcessGroup)
            group = made
            if self._device is not None:  # NCCL connects at the first op, in which all ranks must take part
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._leases.append((key, group))
        self._first.setdefault(ranks, group)
        return group

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        if self._circle is not None:
            return self._circle.group(ranks, self._timeout)
        _tried[ranks] += 1
        name = f"thinwire/{'-'.join(map(str, ranks))}/{_tried[ranks]}"
        return group_named(name, ranks, self._timeout, self._backend)

    def release(self, *, broken: bool = False) -> None:
        """Give the groups back to the pool; drop those that were destroyed, and ``broken`` ones.

        An error may have left ops of these in flight.
        """
        _fresh_pool()
        broken = broken or self._owner is not _pool_owner
        for key, mesh in self._leased_meshes:
            if broken:
                mesh.close()
                if key in bundled and bundled[key].bundles is mesh.bundles:
                    del bundled[key]
                    meshes.pop(key, None)  # they were over the same sockets
            else:
                meshes.setdefault(key, []).append(mesh)
        if not broken:
            for key, group in self._leases:
                _pool.setdefault(key, []).append(group)
        self._leases.clear()
        self._leased_meshes.clear()
        self._held.clear()
        self._first.clear()


class ByteCounter:
    def __init__(self) -> None:
        self.issued: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def record(self, op: Collective, members: int) -> int:
        """Record an op as issued. Return the bytes that this rank sends for it."""
        size = sent_bytes(op, members)
        kind = type(op).__name__
        self.issued[kind] += 1
        self.bytes[kind] += size
        return size

    def add(self, other: ByteCounter) -> None:
        self.issued.update(other.issued)
        self.bytes.update(other.bytes)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class PairwiseWork:
    """Several works of Gloo without futures, each to be waited for only once: only ``then`` starts a thread."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._lock = threading.Lock()
        self._taken = False
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def _take(self) -> bool:
        """Return, once, whether the caller is the one to wait for the works."""
        with self._lock:
            mine, self._taken = not self._taken, True
        return mine

    def _watch(self) -> None:
        for message in self._works:
            try:
                message.wait()
            except RuntimeError as error:
                self._error = self._error or error
        with self._lock:
            self._ended.set()
        for callback in self._callbacks:
            with contextlib.suppress(RuntimeError):
                callback()

    def wait(self) -> None:
        if self._take():
            self._watch()
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def then(self, callback: Callable[[], None]) -> None:
        with self._lock:
            ended = self._ended.is_set()
            if not ended:
                self._callbacks.append(callback)
        if ended:
            callback()
        elif self._take():
            threading.Thread(target=self._watch, name="thinwire-pairwise", daemon=True).start()


def send_and_receive(
    sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor], lane: Lane, tag: int
) -> PairwiseWork | CountdownWork:
    messages = (*sending.values(), *receiving.values())
    if lane.mesh is not None and all(x.device.type == "cpu" for x in messages):
        return lane.mesh.swap(sending, receiving)

    def group(source: int, target: int) -> dist.ProcessGroup:
        return lane.back if lane.back is not None and source > target else lane.group

    works = [dist.irecv(x, lane.ranks[p], group=group(p, lane.rank), tag=tag) for p, x in receiving.items()]
    works += [dist.isend(x, lane.ranks[p], group=group(lane.rank, p), tag=tag) for p, x in sending.items()]
    return PairwiseWork(works)


def _to_all(x: Tensor, out: list[Tensor], lane: Lane, tag: int) -> PairwiseWork | CountdownWork:
    """Send chunk r of ``x`` to rank r; receive the others' chunks into ``out``, in rank order."""
    peers = lane.peers
    return send_and_receive({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in reversed(peers)}, lane, tag)


# torch 2.13 gave these shorter names and deprecates the old ones, which are all that 2.9 has.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_AT_ONCE_BYTES = 16 << 10  # of a sum over a long wire, with which a turn costs more than its bytes
_SWAPPED_BYTES = 64 << 10  # without a mesh; smaller messages that wait for one another gain nothing


def pairwise(topology: Topology) -> tuple[str, ...]:
    """Return the kinds of ops over all ranks that on Gloo consist of messages between pairs.

    All-reduces and all-gathers do if no two ranks share a link: of a ring, only two messages leave a machine.
    """
    kinds = ("ReduceScatter", "AllToAll", "Exchange")
    return (
        (*kinds, "AllReduce", "AllGather") if topology.world_size <= MESH_RANKS and disjoint_links(topology) else kinds
    )


@dataclass(frozen=True)
class Pending:
    works: tuple[Any, ...]
    finish: Callable[[], Tensor]

    def block(self) -> None:
        """Wait until it has completed (Gloo), or make the current stream wait (NCCL). Raise errors of the network."""
        for work in self.works:
            work.wait()

    def wait(self) -> Tensor:
        """Call ``block`` and return the result; call it once, because it may sum over the ranks."""
        self.block()
        return self.finish()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back from another thread when it has completed or failed; ``wait`` then returns or raises at once."""
        if not self.works:
            callback()
            return
        left, lock = [len(self.works)], threading.Lock()

        def one(_: Any) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                callback()

        for work in self.works:
            if isinstance(work, (PairwiseWork, CountdownWork)):
                work.then(lambda: one(None))
            else:
                work.get_future().add_done_callback(one)


def issue(op: Collective, lane: Lane, tag: int = 0) -> Pending:
    """Start ``op``; ``tag`` distinguishes the exchanges of one lane."""
    x = op.tensor if op.tensor.is_contiguous() else op.tensor.contiguous()
    group, size = lane.group, lane.size
    if isinstance(op, AllReduce):
        if _swaps(x, lane):
            if lane.size > 2 and lane.mesh is not None:
                return _all_reduce_in_pairs(x, lane.mesh)
            return _all_reduce_of_two(x, lane, tag)
        return Pending((dist.all_reduce(x, group=group, async_op=True),), lambda: x)
    if isinstance(op, AllGather):
        out = x.new_empty((size, *x.shape)) if op.out is None else op.out.view(size, *x.shape)
        if _swaps(x, lane):
            return _all_gather_in_pairs(x, out, lane, tag)
        work = all_gather_flat(out.view(-1), x.view(-1), group=group, async_op=True)
        return Pending((work,), lambda: out)
    if isinstance(op, AllToAll):
        if x.shape[0] != size:
            raise ValueError(f"an all-to-all over {size} ranks needs that many chunks, not {x.shape[0]}")
        out = torch.empty_like(x)
        return Pending((_all_to_all(x, out, lane, tag),), lambda: out)
    if isinstance(op, ReduceScatter):
        return _reduce_scatter(x.view(-1), lane, tag)
    bundled_here = lane.mesh is not None and lane.mesh.shared and x.device.type == "cpu"
    if isinstance(op, Broadcast) and (lane.mesh_only or bundled_here):
        return _broadcast_in_pairs(x, op.source, lane, tag)
    if isinstance(op, Broadcast):
        return Pending((dist.broadcast(x, lane.ranks[op.source], group=group, async_op=True),), lambda: x)
    if isinstance(op, Exchange):
        return _exchange(op, x, lane, tag)
    raise TypeError(f"{type(op).__name__} is not an op")


def _on_gloo(x: Tensor, lane: Lane) -> bool:
    return lane.backends.get(x.device.type) == "gloo"


def _all_to_all(x: Tensor, out: Tensor, lane: Lane, tag: int) -> Any:
    if _on_gloo(x, lane):
        chunks, into = x.view(lane.size, -1), out.view(lane.size, -1)
        into[lane.rank].copy_(chunks[lane.rank])
        return _to_all(chunks, list(into), lane, tag)
    return dist.all_to_all_single(out, x, group=lane.group, async_op=True)


def _swaps(x: Tensor, lane: Lane) -> bool:
    """Return whether an all-reduce or all-gather consists of messages between pairs, which need CPU tensors."""
    if lane.mesh_only:
        return True
    if x.device.type != "cpu":
        return False
    if lane.mesh is not None:
        return lane.disjoint  # of small tensors too: a ring has 2 (W - 1) turns, each of which takes the link's delay
    return lane.back is not None and lane.size == 2 and x.nbytes >= _SWAPPED_BYTES


def _all_reduce_of_two(x: Tensor, lane: Lane, tag: int) -> Pending:
    """Let two ranks swap everything: as many bytes as in a ring of two, in one turn instead of two."""
    other = torch.empty_like(x)
    return Pending((send_and_receive({1 - lane.rank: x}, {1 - lane.rank: other}, lane, tag),), lambda: x.add_(other))


def _all_reduce_in_pairs(x: Tensor, mesh: Mesh) -> Pending:
    """Sum in two turns; or on a long wire, of few bytes, in one of more bytes, which takes less time there."""
    if not mesh.shared or x.nbytes > _AT_ONCE_BYTES:
        return Pending((mesh.all_reduce(x),), lambda: x)
    everyone = x.new_empty((mesh.size, *x.shape))
    return Pending((mesh.all_gather(x, everyone),), lambda: ordered_sum(list(everyone), out=x))


def _all_gather_in_pairs(x: Tensor, out: Tensor, lane: Lane, tag: int) -> Pending:
    """Let each rank send its tensor to all others, without the copies that Gloo would make."""
    if lane.mesh is not None:
        return Pending((lane.mesh.all_gather(x, out),), lambda: out)
    if out[lane.rank].data_ptr() != x.data_ptr():
        out[lane.rank].copy_(x)
    others = [rank for rank in range(lane.size) if rank != lane.rank]
    return Pending((send_and_receive(dict.fromkeys(others, x), {p: out[p] for p in others}, lane, tag),), lambda: out)


def _broadcast_in_pairs(x: Tensor, source: int, lane: Lane, tag: int) -> Pending:
    others = [rank for rank in range(lane.size) if rank != source]
    messages = (dict.fromkeys(others, x), {}) if lane.rank == source else ({}, {source: x})
    return Pending((send_and_receive(*messages, lane, tag),), lambda: x)


def _reduce_scatter(x: Tensor, lane: Lane, tag: int) -> Pending:
    if x.numel() % lane.size:
        raise ValueError(
            f"a reduce-scatter over {lane.size} ranks needs a multiple of that many elements, not {x.numel()}"
        )
    if lane.mesh is not None and x.device.type == "cpu":
        scatter, total = lane.mesh.reduce_scatter(x)
        return Pending((scatter,), total)
    if not _on_gloo(x, lane):
        shard = x.new_empty(x.numel() // lane.size)
        return Pending((reduce_scatter_flat(shard, x, group=lane.group, async_op=True),), lambda: shard)
    chunks = x.view(lane.size, -1)
    others = iter(chunks.new_empty((lane.size - 1, chunks.shape[1])))
    parts = [chunks[rank] if rank == lane.rank else next(others) for rank in range(lane.size)]
    return Pending((_to_all(chunks, parts, lane, tag),), lambda: ordered_sum(parts))


def _exchange(op: Exchange, x: Tensor, lane: Lane, tag: int) -> Pending:
    if op.peer is None:
        return Pending((), lambda: x)
    out = torch.empty_like(x)
    if _on_gloo(x, lane):
        return Pending((send_and_receive({op.peer: x}, {op.peer: out}, lane, tag),), lambda: out)
    peer = lane.ranks[op.peer]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, out, peer, lane.group), dist.P2POp(dist.isend, x, peer, lane.group)]
    )
    return Pending(tuple(works), lambda: out)
