"""The fastest grouping if selection costs time too: a dynamic programme over Pareto frontiers.

Paper: Shi et al.: Communication-efficient distributed deep learning with merged gradient sparsification on GPUs
(OMGS-SGD), INFOCOM 2020.

Differences from the paper: this is the exact optimum under the paper's own cost model, which its greedy rule
(``greedy_omgs``) misses; that rule also decides on the first two layers that backward yields, which the authors' code
never separates; costs are measured at start for any number of workers; a message holds values and indices together;
selection runs alongside backward if a core or a stream is free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.core.pricing.checks import Price, check_breaks, check_number, check_seconds, check_sizes, priced_row
from thinwire.core.pricing.clock import finish
from thinwire.core.pricing.merge.cuts import Cuts, cuts
from thinwire.core.pricing.merge.result import Merge

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

    Raises:
        ValueError: invalid sizes, times, breaks or cap, or a callable that returns an invalid time.
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    borders = check_breaks(breaks, len(sizes))
    if max_elements is not None:
        check_number("max_elements", max_elements)
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
    """Prices of every allowed group, and bounds on the remaining time after each border.

    ``select[j]`` and ``exchange[j]`` hold the prices of the groups that end at border j, indexed by where they begin.
    ``link_left[i]``: least link time of any grouping from border i on. ``ready_left[i]``: least time from the
    selection clock at i to the end of the last message.
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

        States lie in four arrays, border by border: border, parent, selection clock, link clock. At most ``width``
        states are kept per border, those with the lowest bounds.
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
    """Return the borders of a plan, followed back from its last state."""
    chosen = [last]
    while state >= 0:
        chosen.append(int(border[state]))
        state = int(parent[state])
    return chosen[::-1]
