"""What the server knows about one leader."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from thinwire.systems.parameter_server.messages import Grad, IterationNumber
from thinwire.systems.parameter_server.staleness import UNBOUNDED


@dataclass
class Member:
    """A row of the server's table.

    Attributes:
        seen: newest iteration number; ack: iteration number of the newest gradient sum that has arrived.
        low, buf_low: lower bounds on the bases of what it computes, and of what it has buffered.
        sent: version of the newest weights sent; granted: their number.
        grants: (number, version) of the weights that it has not yet reported as received.
        allowed: the last start that was permitted (SSP); offset: of its clock relative to its own count.
        heard, told: when the last message was received and sent, seconds.
        dropped: how many of its submissions were not finite.
        instance: of its process.
    """

    number: int
    node: int
    workers: int
    heard: float
    offset: int = 0
    seen: int = 0
    ack: int = 0
    seq: int = 0
    low: int = UNBOUNDED
    buf_low: int = UNBOUNDED
    sent: int = -1
    granted: int = 0
    grants: deque[tuple[int, int]] = field(default_factory=deque)
    allowed: int = UNBOUNDED
    told: float = 0.0
    alive: int = 0
    step_us: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    dropped: int = 0
    instance: int = 0

    @property
    def fresh(self) -> bool:
        """Whether it has finished anything since its last sum."""
        return self.seen > self.ack

    @property
    def clock(self) -> int:
        """Its submissions that have arrived, counted from the common origin of SSP."""
        return self.ack + self.offset

    def note(self, message: IterationNumber | Grad) -> None:
        """Copy what a message reports, unless a newer one came first.

        Weights in flight count as work on their version, so the oldest of the unconfirmed grants bounds ``low``.
        """
        if message.seq < self.seq:
            return
        self.seq = message.seq
        self.seen = message.in_total
        self.buf_low = message.buf_low if isinstance(message, IterationNumber) else UNBOUNDED
        while self.grants and self.grants[0][0] <= message.grant:
            self.grants.popleft()
        self.low = min(message.low, self.in_flight())
        if isinstance(message, IterationNumber):
            self.alive, self.step_us, self.dropped = message.alive, message.step_us, message.dropped
            self.loss_sum, self.samples = message.loss_sum, message.samples

    def in_flight(self) -> int:
        """Return the oldest version among weights that may not have arrived yet."""
        return self.grants[0][1] if self.grants else UNBOUNDED

    def grant(self, version: int) -> int:
        """Note that weights are sent; return their number."""
        self.granted += 1
        self.sent = version
        self.grants.append((self.granted, version))
        self.low = min(self.low, version)
        return self.granted
