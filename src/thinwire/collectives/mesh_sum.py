"""Sums in rank order, and the all-reduce that is made of them over a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.collectives.delivery import Delivery
from thinwire.collectives.lanes import Lane
from thinwire.program.bucket import working_dtype


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum W tensors ``[k]`` in rank order, 16-bit floats in fp32; a new tensor of their dtype."""
    dtype = parts[0].dtype
    wide = working_dtype(dtype) if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    if len(parts) == 1:
        return total.to(dtype, copy=True)
    total = total + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(dtype)


def all_reduce_by_mesh(x: Tensor, lane: Lane) -> Delivery:
    """Sum over the ranks, in place; a contiguous CPU tensor.

    Each rank receives the others' parts of its own share, sums them in rank order and sends the sum to all: a ring's
    bytes, ``2 (W - 1) / W`` of the tensor each way, in two turns where a ring takes ``2 (W - 1)``. The second turn has
    streams of its own, since it begins when the sum is there, not in the order of the buckets. The same sums in the
    same order as of a reduce-scatter and an all-gather.
    """
    mesh = lane.mesh
    assert mesh is not None
    shares = list(torch.tensor_split(x.view(-1), lane.size))
    mine = shares[lane.rank]
    peers = [(lane.rank + step) % lane.size for step in range(1, lane.size)]  # nobody is everybody's first choice
    parts = [mine if rank == lane.rank else torch.empty_like(mine) for rank in range(lane.size)]
    whole = Delivery(3 * len(peers))

    def summed() -> None:
        mine.copy_(ordered_sum(parts))
        for peer in peers:
            mesh.second[peer].send(mine, whole)

    first = Delivery(len(peers), summed, whole.fail)
    for peer in peers:
        mesh.first[peer].receive(parts[peer], first)
        mesh.second[peer].receive(shares[peer], whole)
    for peer in peers:
        mesh.first[peer].send(shares[peer], whole)
    return whole
