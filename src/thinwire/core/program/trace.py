"""Run a program on shapes only, to find which collectives it issues, without data and without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.program.bucket import Bucket, Slot
from thinwire.core.program.drive import drive
from thinwire.core.program.method import Method
from thinwire.core.program.ops import AllGather, Collective, NextForward, Op, ReduceScatter, Scope
from thinwire.core.program.shapes import ShapesAlone
from thinwire.core.program.state import State
from thinwire.core.program.topology import Topology
from thinwire.core.program.volume import sent_bytes


@dataclass(frozen=True)
class TracedExchange:
    """One yield: the op's kind, its scope (None for NextForward), bytes of this rank's message, bytes it sends."""

    kind: str
    scope: Scope | None
    message_bytes: int
    sent_bytes: int


def steady_step(method: Method, phase: int) -> int:
    """Return a step of this phase at which warm-ups and dense first steps are long over."""
    return (method.phases << 40) + phase


def trace(
    method: Method,
    shapes: Sequence[tuple[str, Sequence[int]]],
    topology: Topology,
    *,
    rank: int = 0,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
    kept: int = 0,
) -> list[TracedExchange]:
    """Return the collectives that ``method`` issues for a bucket of (name, shape) pairs; ``kept``: of the bucket."""
    state = State(rank, topology)
    state.step = step
    return _run(method, shapes, state, dtype, kept)


def with_rare_rounds(method: Method, programs: Sequence[Sequence[TracedExchange]]) -> list[list[TracedExchange]]:
    """Return the programs with the occasional last round in which low-rank methods compare bases (traces lack it)."""
    rare = [TracedExchange("AllGather", Scope.WORLD, 0, 0)] if method.verify_every else []
    return [[*one, *rare] for one in programs]


def depths(programs: Iterable[Sequence[TracedExchange]]) -> Counter[Scope]:
    """Return how many exchanges the deepest of these programs has within each scope."""
    deepest: Counter[Scope] = Counter()
    for exchanges in programs:
        deepest |= Counter(x.scope for x in exchanges if x.scope is not None)
    return deepest


def memory(
    method: Method, shapes: Sequence[tuple[str, Sequence[int]]], topology: Topology, *, rank: int, dtype: torch.dtype
) -> State:
    """Return the state that ``method`` keeps of these parameters once it is under way, on meta tensors."""
    state = State(rank, topology)
    for phase in range(method.phases):
        state.step = steady_step(method, phase)
        _run(method, shapes, state, dtype)
        state.end_step()
    return state


def _run(
    method: Method, shapes: Sequence[tuple[str, Sequence[int]]], state: State, dtype: torch.dtype, kept: int = 0
) -> list[TracedExchange]:
    meta = torch.device("meta")
    slots = [
        Slot(name, shape, torch.empty(tuple(shape), dtype=dtype, device=meta), dtype, meta) for name, shape in shapes
    ]
    program = method.reduce(Bucket(0, slots, kept=kept), state)
    steps: list[TracedExchange] = []

    def answer(op: Op) -> Tensor | None:
        if isinstance(op, NextForward):
            steps.append(TracedExchange("NextForward", None, 0, 0))
            return None
        members = len(state.topology.members(op.group, state.rank))
        size = op.tensor.numel() * op.tensor.element_size()
        steps.append(TracedExchange(type(op).__name__, op.group, size, sent_bytes(op, members)))
        return result_like(op, members)

    with ShapesAlone():
        drive(program, answer)
    return steps


def result_like(op: Collective, members: int) -> Tensor:
    """Return an uninitialised tensor of the shape that ``op`` returns."""
    if isinstance(op, AllGather):
        return op.tensor.new_empty((members, *op.tensor.shape))
    if isinstance(op, ReduceScatter):
        return op.tensor.new_empty(op.tensor.numel() // members)
    return op.tensor
