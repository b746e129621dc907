"""Fusion by size: the rule of DDP's buckets, applied to the sizes of what is really sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def fuse(
    sizes: Sequence[float],
    limit: float,
    breaks: Collection[int] = (),
    *,
    first: float | None = None,
    min_tail: float = 0.0,
) -> list[list[int]]:
    """Group tensors greedily, in backward order: a bucket is closed when the next tensor would exceed the limit.

    A tensor is never split; one that is larger than the limit has its own bucket. For a compressed method the limit is
    that of the dense gradient, scaled: ``threshold * sum(payload) / sum(numel)``. This keeps the number of buckets, and
    so the overlap, about the same as with S-SGD.

    Args:
        sizes: message sizes of the tensors, in any unit.
        limit: in the same unit; 0 means one bucket per tensor.
        breaks: indices at which a new bucket must begin.
        first: the limit of the first bucket, so that the link has work early; None: ``limit``.
        min_tail: tensors at the end of a bucket that together are smaller than this move to the next one, which may
            then exceed the limit; if the last bucket is smaller than this, it joins the one before. Never across a
            break.

    Returns:
        Lists of indices.

    Example:
        >>> fuse([2, 2, 3, 9, 1], 4)
        [[0, 1], [2], [3], [4]]
    """
    if limit < 0:
        raise ValueError(f"the limit must not be negative, got {limit}")
    groups: list[list[int]] = []
    filled = 0.0
    for i, size in enumerate(sizes):
        most = limit if first is None or len(groups) > 1 else first
        if not groups or i in breaks:
            groups.append([])
            filled = 0.0
        elif most == 0 or filled + size > most:
            kept, carried = _parted(groups[-1], sizes, min_tail)
            groups[-1:] = [kept, carried] if kept else [carried]
            filled = sum(sizes[j] for j in carried)
        groups[-1].append(i)
        filled += size
    if len(groups) > 1 and groups[-1][0] not in breaks and not _parted(groups[-1], sizes, min_tail)[0]:
        last = groups.pop()
        groups[-1] += last
    return groups


def _parted(group: Sequence[int], sizes: Sequence[float], least: float) -> tuple[list[int], list[int]]:
    """Split off the last tensors that together are smaller than ``least``; the rest is empty or at least that large."""
    end, weight = len(group), 0.0
    while end and (weight := weight + sizes[group[end - 1]]) < least:
        end -= 1
    if sum(sizes[i] for i in group[:end]) < least:
        end = 0
    return list(group[:end]), list(group[end:])
