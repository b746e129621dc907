"""Where groups may begin and end: prefix sums, forced borders, the memory cap, and joining if there are too many."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Cuts:
    """Allowed borders between groups, with the sums up to each border.

    Attributes:
        at: tensor indices of the borders, from 0 to the number of tensors.
        elements: elements before each border.
        backward: backward seconds before each border.
        earliest: for a group that ends at border j, the first border at which it may begin.
    """

    at: list[int]
    elements: list[int]
    backward: list[float]
    earliest: list[int]

    def groups(self, borders: Sequence[int]) -> list[list[int]]:
        """Return the tensor indices between the chosen borders, which include the first and the last."""
        return [list(range(self.at[i], self.at[j])) for i, j in pairwise(borders)]


def cuts(
    sizes: list[int],
    seconds: list[float],
    breaks: Sequence[int],
    max_elements: int | None,
    at_most: int | None = None,
) -> Cuts:
    """Return the borders between tensors; with ``at_most``, join the smallest neighbours until that many are left."""
    at = list(range(len(sizes) + 1))
    if at_most is not None and len(sizes) > at_most:
        at = _join(sizes, set(breaks), max_elements, at_most)
    elements = [0, *accumulate(sizes)]
    backward = [0.0, *accumulate(seconds)]
    elements, backward = [elements[i] for i in at], [backward[i] for i in at]
    earliest = [0]
    for j in range(1, len(at)):
        first = earliest[-1]
        if max_elements is not None:  # a single tensor above the cap is a group of its own
            first = max(first, min(j - 1, bisect.bisect_left(elements, elements[j] - max_elements)))
        k = bisect.bisect_left(breaks, at[j])
        if k:
            first = max(first, bisect.bisect_left(at, breaks[k - 1]))
        earliest.append(first)
    return Cuts(at, elements, backward, earliest)


def _join(sizes: list[int], breaks: set[int], max_elements: int | None, at_most: int) -> list[int]:
    """Return the borders left after repeatedly joining the pair of neighbours with the fewest elements."""
    count = len(sizes)
    size, before, after = list(sizes), list(range(-1, count - 1)), list(range(1, count + 1))
    alive = [True] * count
    heap = [(sizes[i] + sizes[i + 1], i, i + 1) for i in range(count - 1) if i + 1 not in breaks]
    heapq.heapify(heap)
    left = count
    while heap and left > at_most:
        total, i, j = heapq.heappop(heap)
        stale = not (alive[i] and alive[j]) or after[i] != j or size[i] + size[j] != total
        if stale or (max_elements is not None and total > max_elements):
            continue
        alive[j] = False  # j now belongs to i
        size[i], after[i] = total, after[j]
        left -= 1
        if after[i] < count:
            before[after[i]] = i
            if after[i] not in breaks:
                heapq.heappush(heap, (total + size[after[i]], i, after[i]))
        if before[i] >= 0 and i not in breaks:
            heapq.heappush(heap, (size[before[i]] + total, before[i], i))
    return [*(i for i in range(count) if alive[i]), count]
