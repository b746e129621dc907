"""Which way of summing over nodes is fastest for which message size, by the costs of this cluster.

Paper: the hybrid all-reduce of Jia et al., arXiv 1807.11205, whose threshold was tuned by hand. Here the table follows
from measured costs. Its choices become part of the plan: ranks that chose differently would wait for each other
forever.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

from thinwire.core.pricing.costs import Costs
from thinwire.core.program.ops import Scope
from thinwire.core.program.topology import Topology
from thinwire.core.program.trace import TracedExchange

WAYS = ("flat", "three_phase", "torus")
"""The sub-programs of ``methods.exchanges``."""

SMALLEST, LARGEST = 1 << 10, 1 << 28


class CollectiveTable:
    """Message bytes -> the cheapest sub-program: (smallest message, sub-program), ascending, exact to the byte."""

    def __init__(self, costs: Costs, topology: Topology, smallest: int = SMALLEST, largest: int = LARGEST) -> None:
        def best(size: int) -> str:
            return min(ways(topology), key=lambda way: way_seconds(way, size, costs, topology))

        sizes = [1 << power for power in range(smallest.bit_length() - 1, largest.bit_length())]
        self.entries = [(0, best(sizes[0]))]
        for low, high in pairwise(sizes):
            while best(high) != self.entries[-1][1]:
                a, b = low, high  # the first size after low whose choice differs
                while b - a > 1:
                    middle = (a + b) // 2
                    a, b = (a, middle) if best(middle) != self.entries[-1][1] else (middle, b)
                self.entries.append((b, best(b)))
                low = b

    def choice(self, message_bytes: int) -> str:
        return self.entries[bisect.bisect_right([start for start, _ in self.entries], message_bytes) - 1][1]


def ways(topology: Topology) -> tuple[str, ...]:
    if topology.nodes == 1 or max(topology.layout) == 1:
        return ("flat",)
    return WAYS if topology.uniform else ("flat", "three_phase")


def way_seconds(way: str, message_bytes: float, costs: Costs, topology: Topology) -> float:
    """Return the seconds of a sub-program for that many bytes on each rank, without the method's own compute."""
    return sum(
        costs.seconds(kind, scope, n, message_bytes * part, share)
        for kind, scope, n, part, share in _hops(way, topology)
    )


def _hops(way: str, topology: Topology) -> list[tuple[str, Scope, int, float, float]]:
    """Return (operation, scope, members, part of the message, share of the node's ranks that send at once) per hop."""
    ranks, nodes = max(topology.layout), topology.nodes
    if way == "flat":
        return [("AllReduce", Scope.WORLD, topology.world_size, 1.0, 1.0)]
    if way == "three_phase":
        return [
            ("AllReduce", Scope.NODE, ranks, 1.0, 1.0),
            ("AllReduce", Scope.CROSS, nodes, 1.0, 1.0 / ranks),
            ("Broadcast", Scope.NODE, ranks, 1.0, 1.0),
        ]
    return [
        ("ReduceScatter", Scope.NODE, ranks, 1.0, 1.0),
        ("AllReduce", Scope.CROSS, nodes, 1.0 / ranks, 1.0),
        ("AllGather", Scope.NODE, ranks, 1.0 / ranks, 1.0),
    ]


def crossing_shares(steps: Sequence[TracedExchange], beside: Sequence[TracedExchange], ranks: int) -> list[float]:
    """Return for each step of a node's first rank the share of its ranks that issue it: all, or only the first.

    ``beside``: the second rank's steps, which stand for the others.
    """
    others, own, shares = sum(step.scope is Scope.CROSS for step in beside), 0, []
    for step in steps:
        own += step.scope is Scope.CROSS
        shares.append(1.0 / ranks if step.scope is Scope.CROSS and own > others else 1.0)
    return shares
