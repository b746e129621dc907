"""The inputs of a simulation (links and faults) and its result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.systems.parameter_server.journal import Journal


@dataclass(frozen=True)
class Link:
    """A node's link to the server.

    Attributes:
        latency_seconds: one way.
        bits_per_second: of the node's network card, in each direction; None: no limit.
        jitter: draws how many seconds a message takes longer.
    """

    latency_seconds: float = 0.0005
    bits_per_second: float | None = None
    jitter: Callable[[random.Random], float] | None = None


@dataclass(frozen=True)
class Fault:
    """Something that happens to a node.

    Attributes:
        at_seconds: when.
        kind: "kill" (the leader, or one ``worker``), "return" (after a kill), "pause" (for ``for_seconds``), or "cut"
            (the connection).
    """

    at_seconds: float
    kind: str
    node: int
    worker: int | None = None
    for_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("kill", "return", "pause", "cut"):
            raise ValueError(f'kind={self.kind!r} is unknown; use "kill", "return", "pause" or "cut"')


@dataclass
class Trace:
    """The result of a simulation.

    Attributes:
        seconds: virtual time at the end.
        updates: (version, at seconds, [(node, worker, step, base)]).
        parameters: the final weights; None without tensors.
        bytes_up, bytes_down: to and from the server, including frames.
        messages: how many, by kind.
        counters: the server's.
        finished: submissions that workers have completed.
        journal: see :mod:`journal`.
        losses: (at seconds, value) as returned by ``evaluate``.
    """

    seconds: float = 0.0
    updates: list[tuple[int, float, list[tuple[int, int, int, int]]]] = field(default_factory=list)
    parameters: Tensor | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    journal: Journal | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def gradients(self) -> int:
        """Number of applied gradients."""
        return sum(len(rows) for _, _, rows in self.updates)

    @property
    def bytes_per_gradient(self) -> float:
        """Bytes up and down per applied gradient."""
        return (self.bytes_up + self.bytes_down) / max(1, self.gradients)

    def staleness(self) -> Counter[int]:
        """Count the applied gradients by their age in versions."""
        return Counter(version - base for version, _, rows in self.updates for *_, base in rows)
