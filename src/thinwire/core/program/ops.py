"""The ops: one dataclass per collective, and ``NextForward``.

A program yields an op and receives its result. An op *owns* its tensor: the code that runs the program may overwrite it
(an all-reduce works in place), so a program that still needs the values sends a copy. Every rank of the group must
yield the same kind of op with the same dtype and size, in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
