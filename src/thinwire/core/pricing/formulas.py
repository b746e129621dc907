"""Formulas for the cost of a collective from a link's latency and rate: rings, Gloo's algorithms, and NCCL's trees.

A cost is ``startups * a + copies * bytes * b``, with a = seconds per message on the link and b = seconds per byte.
``bytes`` is the size of ONE rank's message as ``program.trace`` gives it: for AllReduce the tensor, for ReduceScatter
the whole [W*k] input, for AllToAll the whole [W, ...] input, for AllGather the part that this rank contributes.
"""

from __future__ import annotations

import math

KINDS = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Exchange")
"""The operations that can be priced, named as in ``program.ops``."""


def startups(kind: str, members: int) -> int:
    """Return the number of messages that are sent one after the other."""
    others = members - 1
    if kind == "AllReduce":
        return 2 * others
    if kind in ("ReduceScatter", "AllGather", "AllToAll"):
        return others
    if kind == "Broadcast":  # a binomial tree
        return math.ceil(math.log2(members))
    if kind == "Exchange":
        return min(1, others)
    raise ValueError(f"{kind!r} is not an operation; use one of {', '.join(KINDS)}")


def copies(kind: str, members: int, sharing: int = 1) -> float:
    """Return how many times the message's bytes cross the busiest link.

    Args:
        kind: the operation.
        members: ranks that take part.
        sharing: ranks that share one network card. A ring has one edge that leaves each machine, however many ranks the
            machine has. In an all-to-all, every pair of ranks on two machines sends across, and all pairs of one
            machine use the same card.
    """
    others = members - 1
    if kind == "AllReduce":
        return 2 * others / members
    if kind == "ReduceScatter":
        return others / members
    if kind == "AllToAll":
        if members <= sharing:  # all on one machine
            return others / members
        return sharing * (members - sharing) / members
    if kind == "AllGather":
        return others
    if kind == "Broadcast":
        return math.ceil(math.log2(members))
    if kind == "Exchange":
        return min(1, others)
    raise ValueError(f"{kind!r} is not an operation; use one of {', '.join(KINDS)}")


def tree(a: float, b: float, members: int) -> tuple[float, float]:
    """Return start-up seconds and seconds per byte of an all-reduce along trees that share the links: up, then down.

    Every rank sends the message twice, once on the way up and once on the way down, cut into pieces that are pipelined
    (:class:`~thinwire.core.pricing.curves.RingOrTree`).
    """
    return 2 * math.ceil(math.log2(members)) * a, 2 * b
