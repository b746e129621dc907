"""Sums in rank order, and the all-reduce that is made of them over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.collectives.delivery import Delivery
from thinwire.collectives.lanes import Lane
from thinwire.collectives.stream import memory_of
from thinwire.program.bucket import working_dtype


def ordered_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum W tensors ``[k]`` in rank order, 16-bit floats in fp32.

    Returns:
        A new tensor of their dtype; or ``out``, which may be one of them.
    """
    dtype = parts[0].dtype
    wide = working_dtype(dtype) if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    if len(parts) == 1:
        return total.to(dtype, copy=True) if out is None else out.copy_(total)
    for place, part in enumerate(parts[1:], 1):
        if out is not None and wide == dtype and place == len(parts) - 1:  # nothing is read after it
            return torch.add(total, part, out=out)
        total = total + part if total is parts[0] else total.add_(part)
    return total.to(dtype) if out is None else out.copy_(total)


def all_reduce_by_mesh(x: Tensor, lane: Lane) -> Delivery:
    """Sum over the ranks, in place; a contiguous CPU tensor.

    Each rank receives the others' parts of its own share, sums them in rank order and sends the sum to all: a ring's
    bytes, ``2 (W - 1) / W`` of the tensor each way, in two turns where a ring takes ``2 (W - 1)``. The second turn has
    streams of its own, since it begins when the sum is there, not in the order of the buckets. The same sums in the
    same order as of a reduce-scatter and an all-gather.
    """
    mesh = lane.mesh
    assert mesh is not None
    size, rank = lane.size, lane.rank
    begins = [k * x.numel() // size for k in range(size + 1)]
    mine = x.view(-1)[begins[rank] : begins[rank + 1]]
    theirs = x.new_empty((size - 1, mine.numel()))  # what the others have for my share, in rank order
    peers = [(rank + step) % size for step in range(1, size)]  # nobody is everybody's first choice
    memory, room, wide = memory_of(x), memory_of(theirs), x.itemsize
    shares = [memory[wide * begin : wide * end] for begin, end in pairwise(begins)]
    row = wide * mine.numel()
    whole = Delivery(3 * len(peers))

    def summed() -> None:
        parts = list(theirs.unbind())
        parts.insert(rank, mine)
        ordered_sum(parts, out=mine)
        for peer in peers:
            mesh.second[peer].send(shares[rank], whole)

    first = Delivery(len(peers), summed, whole.fail)
    for peer in peers:
        place = peer - (peer > rank)
        mesh.first[peer].receive(room[row * place : row * (place + 1)], first)
        mesh.second[peer].receive(shares[peer], whole)
    for peer in peers:
        mesh.first[peer].send(shares[peer], whole)
    return whole
