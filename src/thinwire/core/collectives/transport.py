"""Issue one op on a lane: translate a program's ops to torch.distributed, asynchronously.

On Gloo a reduce-scatter is an all-to-all and a sum in rank order. This sends half the bytes of Gloo's own, which is a
whole all-reduce and a slice. The all-to-all consists of messages between pairs (``pairwise_work.py``). Up to a certain
number of ranks, all-reduces and all-gathers do so too: as many bytes as in Gloo's ring, in two turns or one, and no
rank has to be awake to pass others' bytes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.backends import backend_for
from thinwire.core.collectives.by_mesh import all_gather_by_mesh, all_reduce_by_mesh, reduce_scatter_by_mesh
from thinwire.core.collectives.countdown_work import CountdownWork
from thinwire.core.collectives.lanes import Lane, disjoint_links
from thinwire.core.collectives.mesh import MOST_RANKS
from thinwire.core.collectives.ordered_sum import ordered_sum
from thinwire.core.collectives.pairwise_work import PairwiseWork, all_to_all, parts_of_all, send_and_receive
from thinwire.core.program import Topology
from thinwire.core.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    ReduceScatter,
)

# torch 2.13 gave these shorter names and deprecates the old ones, which are all that 2.9 has.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SWAPPED_BYTES = 64 << 10  # for smaller messages a ring's turns cost nothing that counts


def pairwise(topology: Topology) -> tuple[str, ...]:
    """Return the kinds of ops over all ranks that on Gloo consist of messages between pairs.

    All-reduces and all-gathers do if no two ranks share a link: of a ring, only two messages leave a machine.
    """
    kinds = ("ReduceScatter", "AllToAll", "Exchange")
    return (
        (*kinds, "AllReduce", "AllGather") if topology.world_size <= MOST_RANKS and disjoint_links(topology) else kinds
    )


@dataclass(frozen=True)
class Pending:
    """An op in flight."""

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
            if lane.size > 2:
                return Pending((all_reduce_by_mesh(x, lane),), lambda: x)
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
    if isinstance(op, Broadcast) and lane.mesh_only:
        return _broadcast_in_pairs(x, op.source, lane, tag)
    if isinstance(op, Broadcast):
        return Pending((dist.broadcast(x, lane.ranks[op.source], group=group, async_op=True),), lambda: x)
    if isinstance(op, Exchange):
        return _exchange(op, x, lane, tag)
    raise TypeError(f"{type(op).__name__} is not an op")


def _on_gloo(x: Tensor, lane: Lane) -> bool:
    return backend_for(x.device, lane.group) == "gloo"


def _all_to_all(x: Tensor, out: Tensor, lane: Lane, tag: int) -> Any:
    if _on_gloo(x, lane):
        return all_to_all(x.view(lane.size, -1), out.view(lane.size, -1), lane, tag)
    return dist.all_to_all_single(out, x, group=lane.group, async_op=True)


def _swaps(x: Tensor, lane: Lane) -> bool:
    """Return whether an all-reduce or all-gather consists of messages between pairs, which need CPU tensors."""
    if lane.mesh_only:
        return True
    paired = (lane.mesh is not None and lane.disjoint) or (lane.back is not None and lane.size == 2)
    return paired and x.device.type == "cpu" and x.nbytes >= _SWAPPED_BYTES


def _all_reduce_of_two(x: Tensor, lane: Lane, tag: int) -> Pending:
    """Let two ranks swap everything: as many bytes as in a ring of two, in one turn instead of two."""
    other = torch.empty_like(x)
    return Pending((send_and_receive({1 - lane.rank: x}, {1 - lane.rank: other}, lane, tag),), lambda: x.add_(other))


def _all_gather_in_pairs(x: Tensor, out: Tensor, lane: Lane, tag: int) -> Pending:
    """Let each rank send its tensor to all others, without the copies that Gloo would make."""
    if lane.mesh is not None:
        return Pending((all_gather_by_mesh(x, out, lane),), lambda: out)
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
        scatter, total = reduce_scatter_by_mesh(x, lane)
        return Pending((scatter,), total)
    if not _on_gloo(x, lane):
        shard = x.new_empty(x.numel() // lane.size)
        return Pending((reduce_scatter_flat(shard, x, group=lane.group, async_op=True),), lambda: shard)
    work, parts = parts_of_all(x.view(lane.size, -1), lane, tag)
    return Pending((work,), lambda: ordered_sum(parts))


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
