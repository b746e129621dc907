"""Which way of summing over nodes is fastest for which message size, by the costs of this cluster.

Paper: the hybrid all-reduce of Jia et al., arXiv 1807.11205, whose threshold was tuned by hand. Here the table follows
from measured costs. Its choices become part of the plan: ranks that chose differently would wait for each other
forever.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from thinwire.core.pricing.costs import Costs
from thinwire.core.program.ops import Scope
from thinwire.core.program.topology import Topology
from thinwire.core.program.trace import TracedExchange
from thinwire.core.records import Record

WAYS = ("flat", "three_phase", "torus")
"""The sub-programs of ``methods.exchanges``."""

SMALLEST, LARGEST = 1 << 10, 1 << 28


@dataclass(frozen=True)
class CollectiveTable(Record):
    """Table from message bytes to sub-program.

    Attributes:
        entries: (smallest message in bytes, sub-program), ascending; the first begins at 0.
        provenance: the worst provenance among the costs used.
    """

    called: ClassVar[str] = "a table of collectives"

    entries: tuple[tuple[int, str], ...]
    provenance: str = "assumed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple((int(start), str(way)) for start, way in self.entries))
        starts = [start for start, _ in self.entries]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"entries must begin at 0 bytes and ascend, not {starts}")
        for _, way in self.entries:
            if way not in WAYS:
                raise ValueError(f"{way!r} is not a way to sum; use one of {', '.join(WAYS)}")

    def choice(self, message_bytes: int) -> str:
        """Return the sub-program for a message.

        Example:
            >>> table = CollectiveTable(((0, "three_phase"), (65536, "torus")))
            >>> table.choice(1000), table.choice(65536)
            ('three_phase', 'torus')
        """
        return self.entries[bisect.bisect_right([start for start, _ in self.entries], message_bytes) - 1][1]

    @classmethod
    def of(cls, costs: Costs, topology: Topology, smallest: int = SMALLEST, largest: int = LARGEST) -> CollectiveTable:
        """Find the cheapest way for every size: at powers of two, with the crossovers between them to the byte."""

        def best(size: int) -> str:
            return min(ways(topology), key=lambda way: way_seconds(way, size, costs, topology))

        sizes = [1 << power for power in range(smallest.bit_length() - 1, largest.bit_length())]
        entries = [(0, best(sizes[0]))]
        for low, high in pairwise(sizes):
            while best(high) != entries[-1][1]:
                a, b = low, high  # the first size after low whose choice differs
                while b - a > 1:
                    middle = (a + b) // 2
                    a, b = (a, middle) if best(middle) != entries[-1][1] else (middle, b)
                entries.append((b, best(b)))
                low = b
        found = {
            costs.lookup(kind, scope, n).provenance
            for way in ways(topology)
            for kind, scope, n, _, _ in _hops(way, topology)
        }
        order = ("assumed", "measured elsewhere", "measured here")
        return cls(tuple(entries), min(found, key=order.index, default="assumed"))


def ways(topology: Topology) -> tuple[str, ...]:
    """Return the sub-programs that differ on this topology."""
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
    """Return, for each step of a node's first rank, the share of its ranks that issue it: all, or only the first.

    Args:
        steps: steps of the first rank's program.
        beside: steps of the second rank's program, which stands for the others.
        ranks: ranks of the node.
    """
    others, own, shares = sum(step.scope is Scope.CROSS for step in beside), 0, []
    for step in steps:
        own += step.scope is Scope.CROSS
        shares.append(1.0 / ranks if step.scope is Scope.CROSS and own > others else 1.0)
    return shares
