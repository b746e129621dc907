"""Fusion by size: the rule of DDP's buckets, on the sizes of what is really sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def fuse(
    sizes: Sequence[float], limit: float, breaks: Collection[int] = (), *, first: float | None = None
) -> list[list[int]]:
    """Group tensors, in backward order, greedily: a bucket is closed when the next tensor would exceed the limit.

    A tensor is never split; one that is larger than the limit has a bucket of its own. For a compressed method the
    limit is that of the dense gradient, scaled: ``threshold * sum(payload) / sum(numel)``, which keeps the number of
    buckets, and with it the overlap, about that of S-SGD.

    Args:
        sizes: of the tensors' messages, in any unit.
        limit: in the same unit; 0: one bucket per tensor.
        breaks: indices at which a new bucket must begin.
        first: the limit of the first bucket, so that the link has work early; None: ``limit``.

    Returns:
        Lists of indices.

    Example:
        >>> fuse([2, 2, 3, 9, 1], 4)
        [[0, 1], [2], [3], [4]]
    """
    if limit < 0:
        raise ValueError(f"the limit must not be negative, not {limit}")
    groups: list[list[int]] = []
    filled = 0.0
    for i, size in enumerate(sizes):
        most = limit if first is None or len(groups) > 1 else first
        if not groups or most == 0 or i in breaks or filled + size > most:
            groups.append([])
            filled = 0.0
        groups[-1].append(i)
        filled += size
    return groups
