"""N ranks in one process: the reference for tests, and a way to try a method without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program.bucket import Bucket, Slot, working_dtype
from thinwire.core.program.method import Method
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
    sent_bytes,
)
from thinwire.core.program.plan import Plan, PlanBucket
from thinwire.core.program.state import State
from thinwire.core.program.topology import Topology


class OrderError(RuntimeError):
    """The ranks wait for different ops, so that none can continue."""


def run_lockstep(programs: Sequence[Program], topology: Topology, where: str = "") -> list[int]:
    """Run one program per rank to its end; return the bytes that each sent.

    ``OrderError``, if no group has all its ranks at the same op, lists what each rank waits for.
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


Gradients = Mapping[str, "Tensor | None"]


class LocalWorld:
    """Run a method's program for ``size`` ranks, deterministically: sums are added in rank order.

    Args:
        ranks_per_node: one number, or one per node; None: one rank per node.
        plan: which tensors share a bucket; None: one bucket per tensor, in the order of the first rank's dict.
        dense: program of the plan's dense buckets; None: the method's own.
        seed: kept for callers that draw their gradients from it (``world.seed``); methods carry their own seeds.

    Example:
        >>> import torch, thinwire as tw
        >>> world = tw.program.LocalWorld(2)
        >>> out = world.step(tw.SSGD(), [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        >>> out[0]["w"]
        tensor([2.])
    """

    def __init__(
        self,
        size: int,
        ranks_per_node: int | Sequence[int] | None = None,
        *,
        plan: Plan | Sequence[Sequence[str]] | None = None,
        dense: Method | None = None,
        seed: int = 0,
    ) -> None:
        self.topology = Topology(size, ranks_per_node)
        self.size = size
        self.seed = seed
        self.dense = dense
        self.plan = plan if plan is None or isinstance(plan, Plan) else Plan.of(plan)
        self.states = [State(rank, self.topology) for rank in range(size)]
        self._sent = [0] * size
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}

    def step(self, method: Method, gradients: Sequence[Gradients], *, lr: float | None = None) -> list[dict[str, Any]]:
        """Run one synchronised backward.

        Args:
            method: the program to run.
            gradients: one ``{name: Tensor}`` per rank; None marks a parameter this rank did not use. Not edited.
            lr: the learning rate, for methods that ask for it.

        Returns:
            For each rank ``{name: Tensor}``: what it would find in ``.grad``.

        Raises:
            OrderError: the ranks' programs do not match.
        """
        if len(gradients) != self.size:
            raise ValueError(f"{self.size} ranks need {self.size} dicts of gradients, not {len(gradients)}")
        self._learn_kinds(gradients)
        names = [name for name in gradients[0] if name in self._kinds]
        if self.plan is not None:
            self.plan.check(names)
            buckets: Sequence[PlanBucket] = self.plan.buckets(self.states[0].step)
        else:
            buckets = [PlanBucket((name,)) for name in names]
        results: list[dict[str, Any]] = [dict.fromkeys(gradients[0]) for _ in range(self.size)]
        for state in self.states:
            state.lr = lr
        try:
            for index, entry in enumerate(buckets):
                ranks = [self._bucket(index, entry, gradients[rank]) for rank in range(self.size)]
                chosen = entry.applied(self.dense if entry.dense and self.dense is not None else method)
                programs = [chosen.reduce(bucket, state) for bucket, state in zip(ranks, self.states)]
                sent = run_lockstep(programs, self.topology, where=f"bucket {index} ({', '.join(entry.names[:3])})")
                self._sent = [a + b for a, b in zip(self._sent, sent)]
                for rank, bucket in enumerate(ranks):
                    for slot in bucket.slots:
                        results[rank][slot.name] = slot.value_or_zeros().clone() if slot.result is None else slot.result
        except BaseException:
            for state in self.states:
                state.drop_step()
            raise
        for state in self.states:
            state.end_step()
        return results

    def residuals(self) -> list[dict[str, Tensor]]:
        """Return each rank's residuals, by name (clones); a slice is filled up with zeros."""
        return [
            {name: state.extended(name, self._kinds[name][0]).clone() for name in state.residuals}
            for state in self.states
        ]

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each rank has sent so far, by the formulas of a ring."""
        return list(self._sent)

    def _learn_kinds(self, gradients: Sequence[Gradients]) -> None:
        for rank, mine in enumerate(gradients):
            if set(mine) != set(gradients[0]):
                raise ValueError(f"rank {rank} has other names than rank 0: {sorted(set(mine) ^ set(gradients[0]))}")
            for name, value in mine.items():
                if value is None:
                    continue
                kind = (value.shape, value.dtype, value.device)
                if self._kinds.setdefault(name, kind) != kind:
                    raise ValueError(f"{name} is {kind} on rank {rank} but {self._kinds[name]} elsewhere or before")

    def _bucket(self, index: int, entry: PlanBucket, gradients: Gradients) -> Bucket:
        slots = []
        for name in entry.names:
            value = gradients[name]
            shape, dtype, device = self._kinds[name]
            slots.append(Slot(name, shape, None if value is None else value.detach().clone(), dtype, device))
        return Bucket(index, slots, kept=entry.kept)
