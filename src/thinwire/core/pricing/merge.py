"""Which gradients share a message: fusion by size, the published greedy rules, and when the last message arrives.

The exact merges are in ``optimal.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.checks import check_number, check_seconds, check_sizes
from thinwire.core.records import Record

Price = Callable[[int], float]
"""Elements (or kept elements) -> seconds."""


@dataclass(frozen=True)
class Merge(Record):
    """Groups of consecutive tensors in backward order. Plain data that is printed, hashed, broadcast and pinned.

    Attributes:
        groups: indices; every index once, in order.
        rule: how it was made: "optimal", "mgwfbp" or "omgs".
        exact: whether no other grouping can be faster under the same costs.
    """

    called: ClassVar[str] = "a thinwire merge"

    groups: list[list[int]]
    finish_seconds: float
    rule: str
    exact: bool

    def __hash__(self) -> int:
        return hash(self.to_json())


def finish(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    exchange_seconds: Price,
    select_seconds: Price | None = None,
    *,
    side_stream: bool = False,
) -> float:
    """Return when the last message has arrived, in seconds from the start of backward; 0 for no tensors.

    ``groups`` are consecutive indices in backward order; prices are functions of a group's elements, without
    ``select_seconds`` dense. ``side_stream``: selection delays no backward. Scatter and zero-fill after the exchange
    are the same for every grouping and are left out.

    Example:
        >>> finish([[0], [1, 2]], [4, 1, 1], [1.0, 1.0, 1.0], lambda d: 0.5 + d)
        8.0
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    check_groups(groups, len(sizes))
    compute = selected = link = 0.0
    for group in groups:
        size = sum(sizes[i] for i in group)
        for i in group:
            compute += seconds[i]
        ready = compute
        if select_seconds is not None:
            work = priced("select_seconds", select_seconds, size)
            if side_stream:
                ready = selected = max(selected, compute) + work
            else:
                ready = compute = compute + work
        link = max(link, ready) + priced("exchange_seconds", exchange_seconds, size)
    return link


def check_groups(groups: Sequence[Sequence[int]], count: int) -> None:
    following = 0
    for g, group in enumerate(groups):
        if not group:
            raise ValueError(f"groups[{g}] is empty")
        for index in group:
            if index != following:
                raise ValueError(f"groups[{g}] holds {index} where {following} was expected")
            following += 1
    if following != count:
        raise ValueError(f"groups cover {following} tensors, but sizes has {count}")


def priced(name: str, price: Price, size: int) -> float:
    seconds = price(size)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}({size}) must be finite and not negative, got {seconds}")
    return float(seconds)


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


def greedy_mgwfbp(sizes: Sequence[int], backward_seconds: Sequence[float], allreduce_seconds: Price) -> Merge:
    """Merge or close groups as in MG-WFBP (1811.11141, 1912.09268), in backward order.

    The next tensor joins the open group if its gradient is ready before the group's message would have ended, and
    waiting for it costs less than the start-up it saves.

    Args:
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        allreduce_seconds: all-reduce time of a group, by its elements.
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
        select_seconds, exchange_seconds: of a group, by its elements.
        startup_seconds: saving of a merge, instead of the difference of exchange times: the rule of the authors'
            plotting script.
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    if startup_seconds is not None:
        check_number("startup_seconds", startup_seconds, least=0)

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
