"""The ops, their bytes, and how a program is run: one dataclass per collective, and ``NextForward``.

A program yields an op and receives its result. An op *owns* its tensor: the code that runs the program may overwrite it
(an all-reduce works in place), so a program that still needs the values sends a copy. Every rank of the group must
yield the same kind of op with the same dtype and size, in the same order.

Bytes are counted as in ring algorithms: each rank sends 2(W-1)/W of an all-reduced buffer, (W-1)/W of a scattered one,
and its gathered message W-1 times. A broadcast is counted as its mean over the ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


class Scope(enum.Enum):
    """The ranks that take part: all, those of this machine, or one of each machine."""

    WORLD = "world"
    NODE = "node"
    CROSS = "cross"

    __hash__ = object.__hash__  # members compare by identity; enum's own hash is in Python, and runs 300 times a step


WORLD, NODE, CROSS = Scope.WORLD, Scope.NODE, Scope.CROSS


@dataclass(frozen=True, eq=False)
class Collective:
    """What all collectives share: this rank's tensor and the group."""

    tensor: Tensor
    group: Scope = WORLD


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """Sum over the group. Result: the sum, same shape; it may be the same tensor that was sent."""


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective):
    """Sum over the group; each rank receives its own chunk: 1-D ``[W*k]`` -> ``[k]``."""


@dataclass(frozen=True, eq=False)
class AllGather(Collective):
    """All ranks' messages in rank order: ``[*shape]`` -> ``[W, *shape]``; may be written to ``out``, of that size."""

    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """Chunk r of this rank goes to rank r; received chunks are in rank order: ``[W, ...]`` -> ``[W, ...]``."""


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """Send the source's tensor to all ranks. ``source`` is a rank within the group."""

    source: int = 0


@dataclass(frozen=True, eq=False)
class Exchange(Collective):
    """Swap messages with one peer (a rank within the group). ``peer=None`` takes part and sends nothing."""

    peer: int | None = None


@dataclass(frozen=True)
class NextForward:
    """A pause: the rest of the program may wait until the layers of its bucket are needed again.

    For norms of what was scattered: its first ``sums`` elements (over all ranks' parts) are sums over the ranks, the
    others averages; ``unscaled``: a loss scale is already divided out.
    """

    sums: int = 0
    unscaled: bool = False


Op = Collective | NextForward
"""What a program yields."""
Program = Generator[Op, Any, Any]
"""A program: it yields ops, receives their results, and may return a value."""


_nothing = nullcontext()
_DEVICES = ("cpu", "cuda")


def own_modes() -> AbstractContextManager[Any]:
    """Return a context without autocast (which would make products in 16 bits), without inference mode (whose tensors
    no later step may change), without a default device (CPU tensors are made as they are), and outside the transforms
    of torch.func and export (whose tensors have no memory). Grad mode stays, except that it is on where inference mode
    was.
    """
    casts = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    traced = fake or torch._C._functorch.peek_interpreter_stack() is not None
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    placed = any(isinstance(mode, DeviceContext) for mode in modes)  # by set_default_device
    if not casts and not torch.is_inference_mode_enabled() and not traced and not placed:
        return _nothing
    stack = ExitStack()
    if placed:
        stack.enter_context(torch.device("cpu"))
    if traced:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes() if fake else _nothing)
    stack.enter_context(torch.inference_mode(False))
    for device in casts:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextmanager
def in_own_modes() -> Iterator[None]:
    """Do as ``own_modes``; it also decorates functions, which then make state that outlives the caller's modes."""
    with own_modes():
        yield


@dataclass(frozen=True, eq=False)
class Paused:
    """A program at its ``NextForward``: ``shard`` is what it received last, ``rounds`` how many ops it has issued."""

    program: Program
    shard: Any
    pause: NextForward
    rounds: dict[Scope, int] = field(default_factory=dict)


def drive(program: Program, answer: Callable[[Op], Any], *, pause: bool = False) -> Any:
    value: Any = None
    with own_modes():
        while True:
            try:
                op = program.send(value)
            except StopIteration as end:
                return end.value
            if pause and isinstance(op, NextForward):
                return Paused(program, value, op)
            value = answer(op)


def sent_bytes(op: Collective, members: int) -> int:
    """Return the bytes that one rank sends for ``op`` in a group of ``members`` ranks (rounded to the nearest byte)."""
    size = op.tensor.numel() * op.tensor.element_size()
    others = members - 1
    if isinstance(op, AllReduce):
        return round(2 * others * size / members)
    if isinstance(op, (ReduceScatter, AllToAll, Broadcast)):
        return round(others * size / members)
    if isinstance(op, AllGather):
        return others * size
    if isinstance(op, Exchange):
        return 0 if op.peer is None else size
    raise TypeError(f"no formula for {type(op).__name__}")
