"""The two published greedy rules, for comparison. Both look one tensor ahead and neither is optimal."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.pricing.checks import Price, check_number, check_seconds, check_sizes, priced
from thinwire.core.pricing.clock import finish
from thinwire.core.pricing.merge.result import Merge


def greedy_mgwfbp(sizes: Sequence[int], backward_seconds: Sequence[float], allreduce_seconds: Price) -> Merge:
    """Merge or close groups as in MG-WFBP (1811.11141, 1912.09268), in backward order.

    The next tensor joins the open group if its gradient is ready before the group's message would have ended, and
    waiting for it costs less than the start-up it saves.

    Args:
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        allreduce_seconds: all-reduce time of a group, by its elements.

    Raises:
        ValueError: invalid sizes or times, or a callable that returns an invalid time.
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    groups: list[list[int]] = []
    clock = free = held = 0.0  # backward so far, link, latest gradient of the open group
    size = 0
    for j, (more, step) in enumerate(zip(sizes, seconds, strict=True)):
        clock += step
        if groups:
            alone = priced("allreduce_seconds", allreduce_seconds, size)
            start = max(free, held)
            saving = alone + priced("allreduce_seconds", allreduce_seconds, more)
            saving -= priced("allreduce_seconds", allreduce_seconds, size + more)
            if clock < start + alone and (start > clock or clock - start < saving):
                groups[-1].append(j)
                size, held = size + more, clock
                continue
            free = start + alone
        groups.append([j])
        size, held = more, clock
    return Merge(groups, finish(groups, sizes, seconds, allreduce_seconds), "mgwfbp", False)


def greedy_omgs(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_seconds: Price,
    exchange_seconds: Price,
    *,
    startup_seconds: float | None = None,
) -> Merge:
    """Merge or close groups as in OMGS (INFOCOM 2020), in backward order, with selection on the backward stream.

    The loop in the authors' code (HKBU-HPML/OMGS-SGD) begins one pair later: there, the two tensors that backward
    yields first always share a message; here they may be separated. If its loop began with that pair, it would give
    these groups.

    Args:
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        select_seconds: selection time of a group, by its elements.
        exchange_seconds: exchange time of a group, by its elements.
        startup_seconds: saving of a merge, instead of the difference of exchange times: the rule of the authors'
            plotting script.

    Raises:
        ValueError: invalid sizes or times, or a callable that returns an invalid time.
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    if startup_seconds is not None:
        check_number("startup_seconds", startup_seconds)

    def select(d: int) -> float:
        return priced("select_seconds", select_seconds, d)

    def exchange(d: int) -> float:
        return priced("exchange_seconds", exchange_seconds, d)

    groups: list[list[int]] = []
    before = free = span = 0.0  # compute clock before the open group, link, the group's backward time
    size = 0
    for j, (more, step) in enumerate(zip(sizes, seconds, strict=True)):
        if groups:
            end = before + span + select(size)
            start = max(free, end)
            wait = step + select(size + more) - select(size) - select(more) - (start - end)
            saving = startup_seconds
            if saving is None:
                saving = exchange(size) + exchange(more) - exchange(size + more)
            if wait < saving:
                groups[-1].append(j)
                size, span = size + more, span + step
                continue
            before, free = end, start + exchange(size)
        groups.append([j])
        size, span = more, step
    return Merge(groups, finish(groups, sizes, seconds, exchange_seconds, select_seconds), "omgs", False)
