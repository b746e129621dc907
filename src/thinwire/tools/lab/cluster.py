"""The shape of an emulated cluster: number of workers, workers per node, links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.link import LinkSpec
from thinwire.tools.lab.rates import format_rate, parse_delay, parse_rate

_MOST_NODES = 1000  # a Linux bridge has 1023 ports


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster, valid by construction.

    Attributes:
        workers: total number of ranks.
        ranks_per_node: ranks that share a node, and so its link.
        links: bits per second, one for all nodes or one per node; None means unlimited.
        delay_seconds: one-way delay between any two nodes.
    """

    workers: int
    ranks_per_node: int = 1
    links: tuple[int | None, ...] = (None,)
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.ranks_per_node < 1:
            what = "workers" if self.workers < 1 else "ranks per node"
            raise LabError(f"{what} must be at least 1: use for example --workers 4 --ranks-per-node 1")
        if self.workers % self.ranks_per_node:
            raise LabError(
                f"{self.workers} workers are not a multiple of {self.ranks_per_node} ranks per node: "
                f"use for example --workers {math.ceil(self.workers / self.ranks_per_node) * self.ranks_per_node}"
            )
        if self.nodes > _MOST_NODES:
            raise LabError(
                f"{self.nodes} nodes are more than the {_MOST_NODES} that one bridge carries: use --ranks-per-node"
            )
        if len(self.links) not in (1, self.nodes):
            example = ",".join(["1gbit"] * min(self.nodes, 4)) + (",..." if self.nodes > 4 else "")
            raise LabError(
                f"{len(self.links)} links for {self.nodes} nodes: give one for all, or one per node such as {example}"
            )
        for node in range(len(self.links)):
            self.link(node)  # refuses an impossible rate or delay

    @classmethod
    def parse(
        cls, workers: int, ranks_per_node: int = 1, link: str | None = None, delay: str | float | None = None
    ) -> Cluster:
        """Parse a cluster from command-line arguments.

        Args:
            workers: total number of ranks.
            ranks_per_node: ranks that share a node.
            link: ``1gbit``, or one such rate per node after commas; ``unlimited``, ``none`` or None for no limit.
            delay: ``1ms``, or seconds as a number.

        Raises:
            LabError: with one sentence on what is wrong.
        """
        words = [word.strip() for word in ("unlimited" if link is None else link).split(",")]
        links = tuple(None if word.lower() in ("unlimited", "none") else parse_rate(word) for word in words)
        seconds = parse_delay(delay) if isinstance(delay, str) else float(delay or 0.0)
        return cls(workers, ranks_per_node, links, seconds)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.workers // self.ranks_per_node

    def link(self, node: int) -> LinkSpec:
        """Return the link between this node and the switch."""
        return LinkSpec(self.links[node if len(self.links) > 1 else 0], self.delay_seconds)

    def describe(self) -> str:
        """Return a short description, such as ``4 workers on 2 nodes, 1gbit``."""
        links = ",".join(map(format_rate, self.links))
        delay = f", delay {self.delay_seconds * 1e3:g}ms" if self.delay_seconds else ""
        return f"{self.workers} workers on {self.nodes} nodes, {links}{delay}"
