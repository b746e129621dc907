"""Run a program on shapes only, to find which collectives it issues, without data and without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinwire.core.program.bucket import Bucket, Slot
from thinwire.core.program.method import Method
from thinwire.core.program.ops import (
    AllGather,
    Collective,
    NextForward,
    Op,
    ReduceScatter,
    Scope,
    drive,
    in_own_modes,
    sent_bytes,
)
from thinwire.core.program.state import State
from thinwire.core.program.topology import Topology


class ShapesAlone(TorchFunctionMode):
    """Inside, these operations on meta tensors return uninitialised tensors of the right shape; others are torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None and (found := rule(*args, **(kwargs or {}))) is not None:
            return found
        return func(*args, **(kwargs or {}))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if not first.is_meta or any(x.dtype is not first.dtype or x.ndim != first.ndim for x in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor]) -> Tensor | None:
    first = tensors[0]
    return first.new_empty(len(tensors), *first.shape) if first.is_meta else None


def _where(condition: Tensor, this: Any, that: Any) -> Tensor | None:
    if not condition.is_meta:
        return None
    shapes = {x.shape for x in (condition, this, that) if isinstance(x, Tensor) and x.ndim} or {condition.shape}
    return condition.new_empty(shapes.pop(), dtype=torch.result_type(this, that)) if len(shapes) == 1 else None


def _index(x: Tensor, index: Any) -> Tensor | None:
    if not (x.is_meta and isinstance(index, Tensor) and index.dtype is torch.int64):
        return None
    return x.new_empty(*index.shape, *x.shape[1:])


def _arange(count: Any, *more: Any, device: Any = None, dtype: Any = torch.int64) -> Tensor | None:
    on_meta = not more and isinstance(count, int) and device is not None and torch.device(device).type == "meta"
    return torch.empty(count, dtype=dtype, device=device) if on_meta else None


def _zeros(*shape: Any, device: Any = None, dtype: Any = None) -> Tensor | None:
    on_meta = device is not None and torch.device(device).type == "meta"
    return torch.empty(*shape, dtype=dtype, device=device) if on_meta else None


def _like(x: Tensor, *_: Any) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta else None


def _times(x: Tensor, other: Any) -> Tensor | None:
    return _like(x) if isinstance(other, int) and x.dtype is not torch.bool else None


def _compared(x: Tensor, other: Any) -> Tensor | None:
    return x.new_empty(x.shape, dtype=torch.bool) if x.is_meta and isinstance(other, (int, float)) else None


def _same(x: Tensor, other: Any) -> Tensor | None:
    return x if x.is_meta else None


_RULES: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.where: _where,
    torch.arange: _arange,
    torch.zeros: _zeros,
    Tensor.__getitem__: _index,
    Tensor.__neg__: _like,
    Tensor.__rshift__: _like,
    Tensor.mul: _times,
    Tensor.div_: _same,
    Tensor.sub_: _same,
    **dict.fromkeys((Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, Tensor.eq, Tensor.ne), _compared),
}


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


@in_own_modes()
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
    if isinstance(op, AllGather):
        return op.tensor.new_empty((members, *op.tensor.shape))
    if isinstance(op, ReduceScatter):
        return op.tensor.new_empty(op.tensor.numel() // members)
    return op.tensor
