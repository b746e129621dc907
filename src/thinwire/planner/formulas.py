"""How start-up and rate of a link become the cost of a collective: rings, and where not, what Gloo does; trees of sums.

A cost is ``startups * a + copies * bytes * b``, with a = seconds per message on the link, b = seconds per byte, and
bytes those of ONE rank's message as ``program.trace`` gives them: for AllReduce the tensor, for ReduceScatter the whole
[W*k] input, for AllToAll the whole [W, ...] input, for AllGather what this rank brings.
"""

from __future__ import annotations

import math

KINDS = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Exchange")
"""The operations that can be priced: the words of ``program.ops``."""


def startups(kind: str, members: int) -> int:
    """Messages that follow one another."""
    others = members - 1
    if kind == "AllReduce":
        return 2 * others
    if kind in ("ReduceScatter", "AllGather", "AllToAll"):
        return others
    if kind == "Broadcast":  # a binomial tree
        return math.ceil(math.log2(members))
    if kind == "Exchange":
        return min(1, others)
    raise ValueError(f"{kind!r} is not an operation; there are {', '.join(KINDS)}")


def copies(kind: str, members: int, sharing: int = 1) -> float:
    """How many times the message's bytes pass the busiest link.

    Args:
        kind: the operation.
        members: ranks that take part.
        sharing: ranks that share one network card. Of a ring one edge leaves each machine, whatever it holds; of an
            all-to-all every pair on two machines crosses, and the pairs of one machine do so through one card.
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
    raise ValueError(f"{kind!r} is not an operation; there are {', '.join(KINDS)}")


def tree(a: float, b: float, members: int) -> tuple[float, float]:
    """Start-up and seconds per byte of an all-reduce along trees that share the links out: up, then down.

    Every rank sends the message twice, once on the way up and once on the way down, cut into pieces that follow one
    another (:class:`~thinwire.planner.curves.RingOrTree`).
    """
    return 2 * math.ceil(math.log2(members)) * a, 2 * b
