"""Buckets by size: how large they should be, and which tensors share a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from thinwire.core.pricing.merge import fuse

_LAUNCH_SECONDS = 4e-3
"""What one more bucket adds to a step on Gloo if every core has a rank (13 against 2 of 43.6 MB, 2 ranks, 2 cores).
With spare cores it is less. The total is flat around its minimum, so one value serves both cases.
"""
_MIN_TAIL = 1 / 16  # of the limit
_SMALL = 1 / 8  # of the limit: a bucket whose exchange nothing hides
_FEW = 4  # with fewer buckets than this, one more costs more than it gains


def balanced(sizes: Sequence[float], seconds: float) -> float:
    """Return the bucket limit on Gloo for plain averages of which overlap can hide ``seconds``; unit as in ``sizes``.

    n buckets cost n launches. Of the time that could be hidden, 1 / n is exposed, or the last bucket's share if that is
    more. The sum is smallest at n = sqrt(seconds / launch). Layers are not split, so a limit of total / n can give up
    to 2n buckets; the number of buckets is what counts (19 instead of the 11 wanted took 4 % of a step of 4 ranks on 2
    cores).
    """
    total, wanted = sum(sizes), max(1.0, math.sqrt(seconds / _LAUNCH_SECONDS))

    def cost(limit: float) -> float:
        groups = by_size(sizes, limit)
        exposed = max(1 / len(groups), sum(sizes[i] for i in groups[-1]) / total)
        return len(groups) / wanted + wanted * exposed

    return min((total / wanted * 2 ** (k / 8) for k in range(-8, 9)), key=cost) if total else math.inf


def gain_of_overlap(all_reduce: Callable[[float], float], backward_seconds: float) -> Callable[[float], float]:
    """Return a function: bytes -> seconds of an all-reduce that backward can hide, at most the backward time.

    On a slow network, more buckets than this calls for gain nothing, and each of their ring steps waits in the queues.
    """
    return lambda size: min(all_reduce(size), backward_seconds)


def by_size(sizes: Sequence[float], limit: float, *, first: float | None = None) -> list[list[int]]:
    """Fuse like :func:`~thinwire.core.pricing.merge.fuse`, but put a small remainder into the bucket that follows.

    If the last tensor of a bucket is a bias, the bucket would have to wait for it until the layer's weight arrives,
    which belongs to the next bucket. A bias between two weights that each fill a bucket would be a message of its own,
    which takes as many ring steps as a large one.

    Args:
        sizes: message sizes of the tensors, in order of arrival, in any unit.
        limit: in the same unit; a small remainder (up to a sixteenth of it) may exceed it. 0 means one bucket per
            tensor.
        first: the limit of the first bucket.

    Example:
        >>> by_size([32, 1, 40, 1, 40, 1, 40, 1], 42)
        [[0], [1, 2], [3, 4], [5, 6, 7]]
    """
    return fuse(sizes, limit, first=first, min_tail=_MIN_TAIL * limit)


def started_early(groups: list[list[int]], sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Split a small bucket off the first one, so that the link has work early."""
    if len(groups) < _FEW:
        return groups
    first = groups[0]
    cut = by_size([sizes[i] for i in first], limit, first=_SMALL * limit)
    return [[first[i] for i in group] for group in cut] + groups[1:]


def needed_soon(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Return buckets for a decoupled method: the last one is small, since nothing hides its exchange."""
    last = len(sizes) - 1
    return [[last - i for i in group][::-1] for group in fuse(sizes[::-1], limit, first=_SMALL * limit)][::-1]
