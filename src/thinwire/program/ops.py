"""The words of the language: one dataclass per collective, and ``NextForward``.

A program yields one of these and receives the result. An op *owns* its tensor: whoever runs the program may overwrite
it (an all-reduce works in place), so a program that still needs the values sends a copy. Every rank of the group must
yield the same kind with the same dtype and size, in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Scope(enum.Enum):
    """Which ranks take part: all, those of this machine, or one of every machine."""

    WORLD = "world"
    NODE = "node"
    CROSS = "cross"

    __hash__ = object.__hash__  # members are compared by identity; enum's own is Python, and runs 300 times a step


WORLD, NODE, CROSS = Scope.WORLD, Scope.NODE, Scope.CROSS


@dataclass(frozen=True, eq=False)
class Collective:
    """What all collectives share: the tensor this rank brings and the group it brings it to."""

    tensor: Tensor
    group: Scope = WORLD


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """Sum over the group. Result: the sum, same shape; may be the very tensor that was sent."""


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective):
    """Sum over the group, of which this rank receives its own chunk: 1-D ``[W*k]`` -> ``[k]``."""


@dataclass(frozen=True, eq=False)
class AllGather(Collective):
    """Everybody's message in rank order: ``[*shape]`` -> ``[W, *shape]``; it may be put into ``out``, of that size."""

    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """Chunk r of this rank goes to rank r; received chunks are in rank order: ``[W, ...]`` -> ``[W, ...]``."""


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """The source's tensor to everybody. ``source`` counts within the group."""

    source: int = 0


@dataclass(frozen=True, eq=False)
class Exchange(Collective):
    """Swap messages with one peer (a rank within the group). ``peer=None`` takes its turn and moves nothing."""

    peer: int | None = None


@dataclass(frozen=True)
class NextForward:
    """The rest of this program may wait until the layers of its bucket are needed again.

    For norms of what has been scattered: its first ``sums`` elements (all ranks' together) are sums over the ranks, the
    others averages; ``unscaled``: a loss scale is divided out already.
    """

    sums: int = 0
    unscaled: bool = False


Op = Collective | NextForward
"""What a program yields."""
Program = Generator[Op, Any, Any]
"""A program: it yields ops, receives what becomes of them, and may return a value."""
