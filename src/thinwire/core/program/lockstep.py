"""Advance the programs of many ranks together: an op completes when every rank of its group instance has yielded it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program.bucket import working_dtype
from thinwire.core.program.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    NextForward,
    Program,
    ReduceScatter,
)
from thinwire.core.program.topology import Topology
from thinwire.core.program.volume import sent_bytes


class OrderError(RuntimeError):
    """The ranks wait for different ops, so that none can continue."""


def run_lockstep(programs: Sequence[Program], topology: Topology, where: str = "") -> list[int]:
    """Run one program per rank to its end. Return the bytes that each rank sent.

    Raises:
        OrderError: no group instance has all its ranks at the same op; the message lists what each rank waits for.
    """
    size = topology.world_size
    waiting: list[Collective | None] = [None] * size
    sent = [0] * size

    def advance(rank: int, value: Any) -> None:
        try:
            op = programs[rank].send(value)
            while isinstance(op, NextForward):
                op = programs[rank].send(None)
            waiting[rank] = op
        except StopIteration:
            waiting[rank] = None

    for rank in range(size):
        advance(rank, None)
    while any(op is not None for op in waiting):
        ready = _find(waiting, topology)
        if ready is None:
            lines = [f"rank {rank}: {_describe(op)}" for rank, op in enumerate(waiting)]
            raise OrderError(f"the programs of {where or 'this step'} do not fit together. " + "; ".join(lines))
        ops = [waiting[rank] for rank in ready]
        group = topology.members(ops[0].group, ready[0])  # type: ignore[union-attr]
        results = _complete(ops, [group.index(rank) for rank in ready])  # type: ignore[arg-type]
        for rank, op, result in zip(ready, ops, results):
            sent[rank] += sent_bytes(op, len(group))  # type: ignore[arg-type]
            advance(rank, result)
    return sent


def _describe(op: Collective | None) -> str:
    if op is None:
        return "has ended"
    peer = f" with {op.peer}" if isinstance(op, Exchange) else ""
    return f"{type(op).__name__}{peer} of {op.tensor.numel()} x {op.tensor.dtype} in {op.group.value}"


def _signature(op: Collective) -> tuple[Any, ...]:
    source = op.source if isinstance(op, Broadcast) else None
    return type(op), op.group, op.tensor.dtype, op.tensor.numel(), source


def _find(waiting: Sequence[Collective | None], topology: Topology) -> list[int] | None:
    """Return the ranks of an op that can complete now; None: there is none."""
    for rank, op in enumerate(waiting):
        if op is None:
            continue
        members = topology.members(op.group, rank)
        if isinstance(op, Exchange):
            if op.peer is None:
                return [rank]
            peer = members[op.peer]
            other = waiting[peer]
            if peer == rank:
                raise OrderError(f"rank {rank} wants to exchange with itself")
            if (
                isinstance(other, Exchange)
                and _signature(other) == _signature(op)
                and other.peer == members.index(rank)
            ):
                return [rank, peer]
            continue
        ops = [waiting[r] for r in members]
        if all(o is not None and _signature(o) == _signature(op) for o in ops):
            return list(members)
    return None


def _ordered_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum in rank order, 16-bit floats in fp32; the result has the input's dtype."""
    first = tensors[0]
    floating = first.dtype.is_floating_point
    total = first.to(working_dtype(first.dtype)).clone() if floating else first.clone()
    for x in tensors[1:]:
        total += x
    return total.to(first.dtype)


def _complete(ops: Sequence[Collective], places: Sequence[int]) -> list[Tensor]:
    first, tensors = ops[0], [op.tensor for op in ops]
    if isinstance(first, AllReduce):
        total = _ordered_sum(tensors)
        for x in tensors:
            x.copy_(total.view_as(x))  # in place, as real all-reduces do
        return tensors
    if isinstance(first, ReduceScatter):
        if first.tensor.numel() % len(ops):
            raise ValueError(
                f"a reduce-scatter over {len(ops)} ranks needs a multiple of that many elements, "
                f"not {first.tensor.numel()}"
            )
        return list(_ordered_sum([x.reshape(-1) for x in tensors]).clone().chunk(len(ops)))
    if isinstance(first, AllGather):
        return [torch.stack(list(tensors)) for _ in ops]
    if isinstance(first, AllToAll):
        if first.tensor.shape[0] != len(ops):
            raise ValueError(f"an all-to-all over {len(ops)} ranks needs that many chunks, not {first.tensor.shape[0]}")
        return [torch.stack([x[place] for x in tensors]) for place in places]
    if isinstance(first, Broadcast):
        return [tensors[first.source].clone() for _ in ops]
    if isinstance(first, Exchange):
        if first.peer is None:
            return [first.tensor]
        return [tensors[1].clone(), tensors[0].clone()]
    raise TypeError(f"{type(first).__name__} is not an op")
