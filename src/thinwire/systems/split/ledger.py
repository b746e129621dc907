"""Bytes at one end by kind: payload, headers of frames, and what TLS adds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_NAMES = {"z": "activation", "dz": "gradient"}
_DATA = ("logits", "dlogits", "labels", "lengths", "slots", "loss", "ids", "types", "pixels")


@dataclass
class ByteLedger:
    """Counts at one end, in both directions; bytes sent again after a lost connection count again.

    Attributes:
        sent: bytes by kind: activation, gradient, logits, dlogits, labels, lengths, slots, loss, ids, types, pixels,
            control, header, tls.
        received: the same.
        messages: how many, by the kind of their first frame; both directions.
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)

    def note(self, direction: Counter[str], frame: str, payload: int, header: int) -> None:
        """Count one frame; ``frame`` is its kind."""
        direction[_NAMES.get(frame, frame if frame in _DATA else "control")] += payload
        direction["header"] += header

    def add(self, other: ByteLedger) -> None:
        for name in ("sent", "received", "messages"):
            getattr(self, name).update(getattr(other, name))

    @property
    def wire(self) -> int:
        """Everything that went through the socket, both directions."""
        return sum(self.sent.values()) + sum(self.received.values())

    @property
    def state(self) -> int:
        """Only activations and their gradients, both directions: what the published ratio counts."""
        return sum(way[kind] for way in (self.sent, self.received) for kind in _NAMES.values())

    def to_data(self) -> dict[str, dict[str, int]]:
        return {name: dict(sorted(getattr(self, name).items())) for name in ("sent", "received", "messages")}
