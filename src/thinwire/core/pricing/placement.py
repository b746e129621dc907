"""Assignment of work: which worker does which item, and which items every worker does for itself."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.checks import check_seconds
from thinwire.core.records import Record


@dataclass(frozen=True)
class Placement(Record):
    """Who does what. Plain data that is printed, hashed, compared across ranks and pinned.

    Attributes:
        owner: the worker of each item; -1 if every worker does it.
        makespan: when the last worker is done, in the unit of the costs; sending is not included.
    """

    called: ClassVar[str] = "a thinwire placement"

    owner: tuple[int, ...]
    makespan: float

    def items(self, worker: int) -> tuple[int, ...]:
        """Return the items that a worker does, in order: its own and those that all workers do."""
        return tuple(i for i, owner in enumerate(self.owner) if owner in (worker, -1))


def place(costs: Sequence[float], workers: int, communicate_seconds: Sequence[float] | None = None) -> Placement:
    """Assign the longest item first, to the least loaded worker: at most 4/3 - 1/(3 workers) of optimal (Graham 1969).

    An item that is cheaper to compute than to send is computed by every worker; if the costs are equal, it is sent.
    Ties go to the lower index and the lower worker, so all ranks derive the same placement from the same numbers.

    Args:
        costs: cost of each item; in seconds if ``communicate_seconds`` is given, otherwise in any unit.
        communicate_seconds: time to send each item's result; None: no item is computed twice.

    Example:
        >>> place([5.0, 3.0, 3.0, 1.0], 2)
        Placement(owner=(0, 1, 1, 0), makespan=6.0)
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    prices = check_seconds(costs, len(costs), "costs")
    if communicate_seconds is not None and len(communicate_seconds) != len(prices):
        raise ValueError(
            f"communicate_seconds has {len(communicate_seconds)} entries where costs has {len(prices)}: one per item"
        )
    sending = check_seconds(communicate_seconds or [0.0] * len(prices), len(prices), "communicate_seconds")
    owner = [-1] * len(prices)
    alone = [i for i, (cost, send) in enumerate(zip(prices, sending)) if not cost < send]
    loads = [(0.0, worker) for worker in range(workers)]
    for i in sorted(alone, key=lambda i: (-prices[i], i)):
        load, owner[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + prices[i], owner[i]))
    replicated = sum(price for price, worker in zip(prices, owner) if worker < 0)
    return Placement(tuple(owner), replicated + max(load for load, _ in loads))


def place_threshold(dims: Sequence[int], workers: int, threshold: int = 1400) -> Placement:
    """Place like the code of SPD-KFAC (arXiv 2107.06533): every worker inverts all matrices of sides below a threshold.

    Others go to one worker each, longest side first; 1400 in their commits of January 2021, 1024 in their present code.
    """
    if threshold < 0:
        raise ValueError(f"threshold={threshold} must be the side of a matrix, at least 0")
    sent = [i for i, d in enumerate(dims) if d >= threshold]
    found = place([float(dims[i]) for i in sent], workers)
    owner = [-1] * len(dims)
    for i, worker in zip(sent, found.owner):
        owner[i] = worker
    return Placement(tuple(owner), found.makespan + sum(d for d, w in zip(dims, owner) if w < 0))
