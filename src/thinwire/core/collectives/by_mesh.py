"""All-reduce, reduce-scatter and all-gather over a mesh: messages to and from all ranks at once, sums in rank order.

The tensors' memory is split as bytes, not as tensors: when backward has just filled the caches, a call of torch costs
some 20 microseconds, and each op has 2 (W - 1) messages or twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from thinwire.core.collectives.countdown_work import CountdownWork
from thinwire.core.collectives.lanes import Lane
from thinwire.core.collectives.mesh import Mesh
from thinwire.core.collectives.ordered_sum import ordered_sum
from thinwire.core.memory import memory_of


def all_reduce_by_mesh(x: Tensor, lane: Lane) -> CountdownWork:
    """Sum over the ranks, in place; a contiguous CPU tensor.

    Each rank receives the others' parts of its own share, sums them in rank order and sends the sum to all ranks. These
    are a ring's bytes, ``2 (W - 1) / W`` of the tensor each way, but in two turns instead of ``2 (W - 1)``. The second
    turn has its own streams, because it begins when the sum is there, not in the order of the buckets. The sums are the
    same, in the same order, as those of a reduce-scatter and an all-gather.
    """
    mesh, peers, rank = _mesh(lane), lane.peers, lane.rank
    begins = [k * x.numel() // lane.size for k in range(lane.size + 1)]
    memory, wide = memory_of(x), x.itemsize
    shares = [memory[wide * begin : wide * end] for begin, end in pairwise(begins)]
    mine = x.view(-1)[begins[rank] : begins[rank + 1]]
    theirs, room = _room(mine, lane)
    whole = CountdownWork(3 * len(peers))

    def summed() -> None:
        ordered_sum(_in_order(theirs, mine, rank), out=mine)
        for peer in peers:
            mesh.second[peer].send(shares[rank], whole)

    first = CountdownWork(len(peers), summed, whole.fail)
    for peer in peers:
        mesh.first[peer].receive(room[peer], first)
        mesh.second[peer].receive(shares[peer], whole)
    for peer in peers:
        mesh.first[peer].send(shares[peer], whole)
    return whole


def reduce_scatter_by_mesh(x: Tensor, lane: Lane) -> tuple[CountdownWork, Callable[[], Tensor]]:
    """Sum over the ranks; each keeps its share. Contiguous on the CPU, a multiple of W elements.

    Returns:
        The work, and a function that returns the sum once the work has ended.
    """
    mesh, peers, rank = _mesh(lane), lane.peers, lane.rank
    mine = x.view(lane.size, -1)[rank]
    theirs, room = _room(mine, lane)
    memory, share = memory_of(x), mine.nbytes
    work = CountdownWork(2 * len(peers))
    for peer in reversed(peers):
        mesh.first[peer].receive(room[peer], work)
    for peer in peers:
        mesh.first[peer].send(memory[share * peer : share * (peer + 1)], work)
    return work, lambda: ordered_sum(_in_order(theirs, mine, rank))


def all_gather_by_mesh(x: Tensor, out: Tensor, lane: Lane) -> CountdownWork:
    """Gather ``x`` of every rank into ``out``, in rank order; contiguous on the CPU, ``out`` W times as large."""
    mesh, peers, share = _mesh(lane), lane.peers, x.nbytes
    memory = memory_of(out)
    if out.data_ptr() + lane.rank * share != x.data_ptr():
        out.view(lane.size, -1)[lane.rank].copy_(x.view(-1))
    mine = memory[share * lane.rank : share * (lane.rank + 1)]
    work = CountdownWork(2 * len(peers))
    for peer in peers:
        mesh.first[peer].receive(memory[share * peer : share * (peer + 1)], work)
    for peer in peers:
        mesh.first[peer].send(mine, work)
    return work


def _mesh(lane: Lane) -> Mesh:
    assert lane.mesh is not None
    return lane.mesh


def _room(mine: Tensor, lane: Lane) -> tuple[Tensor, dict[int, memoryview]]:
    """Allocate room for the others' parts of this rank's share: in rank order, and as memory by rank."""
    others = [rank for rank in range(lane.size) if rank != lane.rank]
    theirs = mine.new_empty((len(others), mine.numel()))
    memory, wide = memory_of(theirs), mine.nbytes
    return theirs, {rank: memory[wide * place : wide * (place + 1)] for place, rank in enumerate(others)}


def _in_order(theirs: Tensor, mine: Tensor, rank: int) -> list[Tensor]:
    parts = list(theirs.unbind())
    parts.insert(rank, mine)
    return parts
