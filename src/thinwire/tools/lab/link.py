"""One link of a node: the queueing disciplines that limit its speed."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.rates import LONGEST_DELAY, check_rate

_LARGEST_PACKET = 65536
_SMALLEST_BURST = 8192
_LARGEST_BURST = 16 * 2**20
_SMALLEST_QUEUE = 256 * 2**10
_LARGEST_QUEUE = 2**30


@dataclass(frozen=True)
class LinkSpec:
    """A node's link to the switch, the same in both directions.

    The bucket holds one millisecond of the rate. That is enough for a timer that wakes late on a busy machine, and too
    little for a small message to pass at memory speed. The queue behind it holds 50 ms, so that TCP fills the link with
    almost no loss. Offloaded packets are limited to half a bucket: larger ones would be split inside the discipline,
    which costs much CPU time.

    Attributes:
        rate: bits per second; None means unlimited.
        delay_seconds: one-way delay from this node to any other, applied where the node sends (needs netem).
    """

    rate: int | None = None
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self.rate)
        if not 0 <= self.delay_seconds <= LONGEST_DELAY:
            raise LabError(
                f"delay of {self.delay_seconds} s is outside 0 to {LONGEST_DELAY:.0f} s: use for example 1ms"
            )

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket: what can pass at once after a pause."""
        return max(_SMALLEST_BURST, min(_LARGEST_BURST, (self.rate or 0) // 8000))

    @property
    def queue_bytes(self) -> int:
        """What can wait behind the bucket before packets are dropped."""
        return self.burst_bytes + max(_SMALLEST_QUEUE, min(_LARGEST_QUEUE, (self.rate or 0) // 160))

    @property
    def packet_bytes(self) -> int:
        """Largest offloaded packet that a sender on this link may pass to its interface."""
        return min(_LARGEST_PACKET, self.burst_bytes // 2) if self.rate else _LARGEST_PACKET

    def egress_of_node(self, device: str) -> list[str]:
        """Return lines for ``tc -batch``: what the node sends is delayed, then shaped."""
        if not self.delay_seconds:
            return self.egress_of_switch(device)
        microseconds = max(1, round(self.delay_seconds * 1e6))
        lines = [f"qdisc add dev {device} root handle 1: netem delay {microseconds}us limit 1000000"]
        return lines + [f"qdisc add dev {device} parent 1: handle 2: {self._bucket()}"] * (self.rate is not None)

    def egress_of_switch(self, device: str) -> list[str]:
        """Return lines for ``tc -batch``: what the switch sends to the node is shaped."""
        return [] if self.rate is None else [f"qdisc add dev {device} root {self._bucket()}"]

    def _bucket(self) -> str:
        return f"tbf rate {self.rate}bit burst {self.burst_bytes} limit {self.queue_bytes}"
