"""What the leader of a node knows within one membership: the counterpart of the server's ``table.Member``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from thinwire.systems.parameter_server.aggregate import Aggregator
from thinwire.systems.parameter_server.messages import Grad, IterationNumber, Row, Weights
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import UNBOUNDED


@dataclass
class Membership:
    """From a WELCOME until the leader leaves, is dropped, or loses the server; then a new one is made.

    Attributes:
        number: given by the server; 0: not a member.
        version: of the weights held; -1 before the first. grant: number under which they were sent.
        allowed: the last start that is permitted (SSP).
        floor: the oldest version on which workers may still start.
        seq: of the newest message sent; probe: the newest of the server's, to be echoed.
        in_total: submissions handed in so far; acked: how many of them the server has; started: workers' starts.
        loss_sum, samples: over the finite submissions; dropped: how many were not finite.
        steps: local steps per start.
        next_step: of each worker.
        computing: base version of what each busy worker computes; begun: its step.
        round: with ``local="sync"``, what workers have handed in since all started.
        made: starts of each worker on the weights held.
        buffer: sums waiting for a PULL.
    """

    settings: Settings
    next_step: dict[int, int]
    number: int = 0
    version: int = -1
    grant: int = 0
    allowed: int = UNBOUNDED
    floor: int = -UNBOUNDED
    seq: int = 0
    probe: int = 0
    in_total: int = 0
    acked: int = 0
    started: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    dropped: int = 0
    steps: int = 0
    computing: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    round: list[tuple[Row, Any]] = field(default_factory=list)
    made: Counter[int] = field(default_factory=Counter)
    buffer: Aggregator = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.buffer = Aggregator(settings.alpha, settings.norm, settings.deterministic)
        self.steps = settings.local_update.steps

    def is_open(self, worker: int) -> bool:
        """Return whether the worker may start on the current weights, now or once it is idle."""
        fresh = self.version >= 0 and self.version >= self.floor
        return fresh and self.made[worker] < self.settings.starts_per_version and self.started <= self.allowed

    def has_room(self, workers: int) -> bool:
        """Return whether one more of this number of workers may start, by what already waits to be sent."""
        if self.settings.transfer == "push":  # at most as many pushed sums may wait for the link, unanswered
            return self.in_total - self.acked + len(self.computing) < workers
        return len(self.buffer) + len(self.computing) < max(self.settings.buffer, workers)

    def low(self, alive: Collection[int]) -> int:
        """Return a lower bound on the base of every gradient not yet buffered: being computed, or yet to start."""
        bases = [*self.computing.values(), *(row.base for row, _ in self.round)]
        if any(self.is_open(worker) for worker in alive):
            bases.append(self.version)
        return min(bases, default=UNBOUNDED)

    def start(self, worker: int) -> int:
        """Note that a worker starts on the weights held; return its step."""
        step = self.next_step[worker]
        self.computing[worker], self.begun[worker] = self.version, step
        self.next_step[worker] = step + 1
        self.made[worker] += 1
        self.started += 1
        return step

    def lost(self, worker: int) -> bool:
        """Note that what a worker computes will not come, or SSP would wait for it; return whether it computed."""
        computed = self.computing.pop(worker, None) is not None
        self.started -= computed
        return computed

    def take_weights(self, message: Weights) -> None:
        """Note what comes with new weights."""
        self.version, self.grant, self.allowed = message.version, message.grant, message.allowed
        self.steps, self.acked = message.steps, message.ack
        self.made.clear()

    def raise_floor(self, next_version: int) -> None:
        """Note the version of the next update: results on too old weights would miss the bound."""
        self.floor = max(self.floor, next_version - self.settings.bound)

    def report(self, alive: Collection[int], step_us: float) -> IterationNumber:
        """Compose the IN for this moment."""
        self.seq += 1
        return IterationNumber(
            self.number, self.seq, self.in_total, self.low(alive), self.buffer.low, self.grant,
            self.loss_sum, self.samples, self.dropped, int(step_us), len(alive), self.probe,
        )  # fmt: skip

    def grad(self, alive: Collection[int], pull: int, weight: float, rows: tuple[Row, ...], tensor: Any) -> Grad:
        """Compose a message with a gradient sum; ``pull``: number of the PULL that it answers, 0: pushed."""
        self.seq += 1
        return Grad(
            self.number, pull, self.seq, self.in_total, self.low(alive), self.grant, weight, rows, tensor
        )  # fmt: skip
