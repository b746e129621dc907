"""Slices of the flat weights: which elements each shard holds."""

from __future__ import annotations

from itertools import pairwise


def slices(numel: int, shards: int) -> tuple[slice, ...]:
    """Cut ``[D]`` into contiguous slices, in order, of equal size up to one element; none is empty.

    Args:
        numel: D, number of elements.
        shards: k, number of slices.

    Raises:
        ValueError: there are fewer elements than shards, or no shards.

    Example:
        >>> slices(7, 2)
        (slice(0, 3, None), slice(3, 7, None))
    """
    if not 1 <= shards <= numel:
        raise ValueError(f"shards={shards!r} must be at least 1 and at most the model's {numel} elements")
    ends = [numel * i // shards for i in range(shards + 1)]
    return tuple(slice(first, end) for first, end in pairwise(ends))
