"""The fastest groupings, by dynamic programmes that are exact for any cost function: dense, and with selection.

Paper: Shi et al.: Communication-efficient distributed deep learning with merged gradient sparsification on GPUs
(OMGS-SGD), INFOCOM 2020.

Differences from the paper: this is the exact optimum under the paper's own cost model, which its greedy rule
(``greedy_omgs``) misses; that rule also decides on the first two layers that backward yields, which the authors' code
never separates; costs are measured at start for any number of workers; a message holds values and indices together;
selection runs alongside backward if a core or a stream is free.

With selection, a prefix has a Pareto frontier of two clocks.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from thinwire.core.checks import check_number, check_seconds, check_sizes
from thinwire.core.pricing.merge import Merge, Price, finish


@dataclass(frozen=True)
class Cuts:
    """Allowed borders between groups, with the elements and backward seconds before each.

    A group that ends at border j may begin at border ``earliest[j]`` and later.
    """

    at: list[int]
    elements: list[int]
    backward: list[float]
    earliest: list[int]

    def groups(self, borders: Sequence[int]) -> list[list[int]]:
        return [list(range(self.at[i], self.at[j])) for i, j in pairwise(borders)]


def check_breaks(breaks: Collection[int], count: int) -> list[int]:
    for position in breaks:
        if not 0 <= position < count:
            raise ValueError(f"breaks: {position} is out of range for {count} tensors")
    return sorted(set(breaks))


def priced_row(name: str, price: Price, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return the seconds that ``price`` gives for many sizes: called once per size, checked together."""
    row = np.array([price(size) for size in sizes], dtype=np.float64)
    bad = ~(np.isfinite(row) & (row >= 0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"{name}({sizes[i]}) must be finite and not negative, got {row[i]}")
    return row


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

    Example:
        >>> optimal_dense([8, 1, 1], [1.0, 1.0, 1.0], lambda d: 1.0 + d / 4).groups
        [[0], [1, 2]]
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    borders = check_breaks(breaks, len(sizes))
    if max_elements is not None:
        check_number("max_elements", max_elements, least=0)
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


EXACT_UP_TO = 512
"""With more tensors than this, the smallest neighbours are joined first, until JOINED_TO are left."""
JOINED_TO = 256
_SCOUT = 24  # states per border in the first sweep, which only finds a good plan
WIDEST = 4096  # states per border in the second; only unrealistic costs reach it
_SLACK = 1e-9  # relative; keeps rounding from pruning the plan that set the bound

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def optimal_sparse(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_seconds: Price,
    exchange_seconds: Price,
    *,
    side_stream: bool = False,
    breaks: Collection[int] = (),
    max_elements: int | None = None,
) -> Merge:
    """Group tensors so that the last sparse message arrives as early as possible.

    A grouping moves two clocks, that of the selection and that of the link, so every prefix keeps all pairs that no
    other pair beats in both. Pairs that provably end later than a plan already found are dropped.

    Args:
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        select_seconds: selection time of a group, by its elements.
        exchange_seconds: exchange time of a group, by its elements (the callable knows density, message format and
            workers).
        side_stream: selection runs alongside backward (this library's engine); False: it delays the rest of backward
            (the model of the papers).
        breaks: indices that must open a group.
        max_elements: largest number of elements in a group, unless it is a single tensor.

    Returns:
        The merge. ``exact`` is False if tensors had to be joined beforehand (more than 512 of them).
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    borders = check_breaks(breaks, len(sizes))
    if max_elements is not None:
        check_number("max_elements", max_elements, least=0)
    if not sizes:
        return Merge([], 0.0, "optimal", True)
    joined = len(sizes) > EXACT_UP_TO
    table = cuts(sizes, seconds, borders, max_elements, JOINED_TO if joined else None)
    problem = _Problem.of(table, select_seconds, exchange_seconds, side_stream)
    scouted, plan, _ = problem.sweep(np.inf, _SCOUT)
    _, plan, complete = problem.sweep(scouted * (1 + _SLACK), WIDEST)
    groups = table.groups(plan)
    ends = finish(groups, sizes, seconds, exchange_seconds, select_seconds, side_stream=side_stream)
    return Merge(groups, ends, "optimal", complete and not joined)


@dataclass(frozen=True)
class _Problem:
    """Prices of every allowed group by the border where it ends, and bounds on the time after each border.

    ``link_left[i]``: least link time of any grouping from border i on; ``ready_left[i]``: from its selection clock.
    """

    table: Cuts
    select: list[_Floats]
    exchange: list[_Floats]
    side_stream: bool
    link_left: _Floats
    ready_left: _Floats

    @classmethod
    def of(cls, table: Cuts, select_seconds: Price, exchange_seconds: Price, side_stream: bool) -> _Problem:
        last = len(table.at) - 1
        select, exchange = [np.zeros(0)], [np.zeros(0)]
        for j in range(1, last + 1):
            sizes = [table.elements[j] - d for d in table.elements[table.earliest[j] : j]]
            select.append(priced_row("select_seconds", select_seconds, sizes))
            exchange.append(priced_row("exchange_seconds", exchange_seconds, sizes))
        backward = np.array(table.backward)
        link_left, ready_left = np.full(last + 1, np.inf), np.full(last + 1, np.inf)
        link_left[last] = 0.0
        for j in range(last, 0, -1):
            begins = slice(table.earliest[j], j)
            work = select[j] if side_stream else select[j] + (backward[j] - backward[begins])
            after = exchange[j] if j == last else ready_left[j]
            link_left[begins] = np.minimum(link_left[begins], exchange[j] + link_left[j])
            ready_left[begins] = np.minimum(ready_left[begins], work + after)
        return cls(table, select, exchange, side_stream, link_left, ready_left)

    def sweep(self, bound: float, width: int) -> tuple[float, list[int], bool]:
        """Return the best end, its borders, and whether no state was dropped for lack of room.

        States are arrays of border, parent, selection and link clock; the ``width`` with the lowest bounds stay per
        border.
        """
        table, last = self.table, len(self.table.at) - 1
        backward = np.array(table.backward)
        border: _Ints = np.zeros(1, np.int64)
        parent: _Ints = np.full(1, -1, np.int64)
        ready, link = np.zeros(1), np.zeros(1)
        starts, complete = [0], True
        for j in range(1, last + 1):
            starts.append(len(border))
            first = starts[table.earliest[j]]
            begin = border[first:]
            select = self.select[j][begin - table.earliest[j]]
            if self.side_stream:
                new_ready = np.maximum(ready[first:], backward[j]) + select
            else:
                new_ready = ready[first:] + (backward[j] - backward[begin]) + select
            new_link = np.maximum(link[first:], new_ready) + self.exchange[j][begin - table.earliest[j]]
            if j == last:
                best = int(new_link.argmin())  # the first: the longest last group
                return float(new_link[best]), _borders(border, parent, first + best, last), complete
            ends = np.maximum(new_link + self.link_left[j], new_ready + self.ready_left[j])
            kept = np.flatnonzero(ends <= bound)
            kept = kept[np.lexsort((new_link[kept], new_ready[kept]))]
            lowest = np.minimum.accumulate(new_link[kept])
            kept = kept[np.r_[True, lowest[1:] < lowest[:-1]]] if len(kept) else kept
            if len(kept) > width:
                complete = False
                kept = kept[np.linspace(0, len(kept) - 1, width).astype(np.int64)]
            border = np.append(border, np.full(len(kept), j))
            parent = np.append(parent, first + kept)
            ready, link = np.append(ready, new_ready[kept]), np.append(link, new_link[kept])
        raise AssertionError("there is always a last border")


def _borders(border: _Ints, parent: _Ints, state: int, last: int) -> list[int]:
    chosen = [last]
    while state >= 0:
        chosen.append(int(border[state]))
        state = int(parent[state])
    return chosen[::-1]
