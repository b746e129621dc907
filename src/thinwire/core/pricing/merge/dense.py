"""The fastest grouping for dense all-reduce: an exact dynamic programme for any cost function."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from thinwire.core.pricing.checks import Price, check_breaks, check_number, check_seconds, check_sizes, priced_row
from thinwire.core.pricing.clock import finish
from thinwire.core.pricing.merge.cuts import cuts
from thinwire.core.pricing.merge.result import Merge


def optimal_dense(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    allreduce_seconds: Price,
    *,
    breaks: Collection[int] = (),
    max_elements: int | None = None,
) -> Merge:
    """Group tensors so that the last all-reduce ends as early as possible.

    The end of a prefix depends on its grouping only through the link, since grouping does not move the backward pass.
    So one number per prefix is enough, and the time is O(L^2).

    Args:
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        allreduce_seconds: all-reduce time of a group, by its elements; need not be monotone.
        breaks: indices that must open a group (another dtype, device or rule).
        max_elements: largest number of elements in a group, unless it is a single tensor.

    Returns:
        The merge; among equal ones, the one whose last group is longest, at every step backwards.

    Raises:
        ValueError: invalid sizes, times, breaks or cap, or a callable that returns an invalid time.

    Example:
        >>> optimal_dense([8, 1, 1], [1.0, 1.0, 1.0], lambda d: 1.0 + d / 4).groups
        [[0], [1, 2]]
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    borders = check_breaks(breaks, len(sizes))
    if max_elements is not None:
        check_number("max_elements", max_elements)
    if not sizes:
        return Merge([], 0.0, "optimal", True)
    table = cuts(sizes, seconds, borders, max_elements)
    ends = np.zeros(len(sizes) + 1)
    begins = [0] * (len(sizes) + 1)
    for j in range(1, len(sizes) + 1):
        first, total = table.earliest[j], table.elements[j]
        row = priced_row("allreduce_seconds", allreduce_seconds, [total - d for d in table.elements[first:j]])
        row += np.maximum(ends[first:j], table.backward[j])
        best = int(row.argmin())  # the first: the longest last group
        ends[j], begins[j] = row[best], first + best
    chosen = [len(sizes)]
    while chosen[-1]:
        chosen.append(begins[chosen[-1]])
    groups = table.groups(chosen[::-1])
    return Merge(groups, finish(groups, sizes, seconds, allreduce_seconds), "optimal", True)
