"""Buckets by size: how large they should be, and which tensors share one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from thinwire.planner.merge import fuse

_LAUNCH_SECONDS = 4e-3
"""What one bucket more costs a step on Gloo where every core has a rank (13 against 2 of 43.6 MB, 2 ranks, 2 cores).
With cores to spare it is less; the sum is flat round its minimum, so that one value serves both.
"""
_MIN_TAIL = 1 / 16  # of the limit
_SMALL = 1 / 8  # of the limit: a bucket that nothing hides
_FEW = 4  # buckets, for which one more costs more than it brings


def balanced(sizes: Sequence[float], seconds: float) -> float:
    """The limit of a bucket on Gloo, for plain averages of which overlap can hide ``seconds``; in ``sizes``' unit.

    n buckets cost n launches, and of what could be hidden 1 / n is not, or the last bucket's share if that is more: the
    sum is least at n = sqrt(seconds / launch). Layers are not cut, so that a limit of an n-th leaves up to twice as
    many: what counts is how many there are (19 for 11 wanted took 4 % of a step of 4 ranks on 2 cores).
    """
    total, wanted = sum(sizes), max(1.0, math.sqrt(seconds / _LAUNCH_SECONDS))

    def cost(limit: float) -> float:
        groups = by_size(sizes, limit)
        exposed = max(1 / len(groups), sum(sizes[i] for i in groups[-1]) / total)
        return len(groups) / wanted + wanted * exposed

    return min((total / wanted * 2 ** (k / 8) for k in range(-8, 9)), key=cost) if total else math.inf


def gain_of_overlap(all_reduce: Callable[[float], float], backward_seconds: float) -> Callable[[float], float]:
    """Seconds that backward can hide of an all-reduce of that many bytes: no more than backward lasts.

    On a slow network more buckets than that calls for bring nothing, and each of their turns waits in its queues.
    """
    return lambda size: min(all_reduce(size), backward_seconds)


def by_size(sizes: Sequence[float], limit: float, *, first: float | None = None) -> list[list[int]]:
    """As :func:`~thinwire.planner.merge.fuse`, but a small remainder goes with what follows it.

    A bias that is the last in a bucket would hold it back until the layer's weight arrives, which is the next bucket's;
    one between two weights that fill a bucket each would be a message of its own, which takes as many turns of the ring
    as a large one.

    Args:
        sizes: of the tensors' messages, in the order in which they arrive, in any unit.
        limit: in the same unit; a small remainder (up to a sixteenth of it) may exceed it. 0: one bucket per tensor.
        first: the limit of the first bucket.

    Example:
        >>> by_size([32, 1, 40, 1, 40, 1, 40, 1], 42)
        [[0], [1, 2], [3, 4], [5, 6, 7]]
    """
    return fuse(sizes, limit, first=first, min_tail=_MIN_TAIL * limit)


def started_early(groups: list[list[int]], sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Cut a small bucket off the first one, so that the link has work early."""
    if len(groups) < _FEW:
        return groups
    first = groups[0]
    cut = by_size([sizes[i] for i in first], limit, first=_SMALL * limit)
    return [[first[i] for i in group] for group in cut] + groups[1:]


def needed_soon(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Buckets of a decoupled method: a small last one, since nothing hides its exchange on either side of the step."""
    last = len(sizes) - 1
    return [[last - i for i in group][::-1] for group in fuse(sizes[::-1], limit, first=_SMALL * limit)][::-1]
