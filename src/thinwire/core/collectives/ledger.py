"""Count collectives and bytes by kind, by the formulas of ``core/program/volume.py``."""

from __future__ import annotations

from collections import Counter

from thinwire.core.program.ops import Collective
from thinwire.core.program.volume import sent_bytes


class Ledger:
    """The collectives that this rank has issued.

    Attributes:
        issued: number of collectives by kind.
        bytes: bytes sent by kind (one rank's share of a ring).
    """

    def __init__(self) -> None:
        self.issued: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def record(self, op: Collective, members: int) -> int:
        """Record an op as issued. Return the bytes that this rank sends for it."""
        size = sent_bytes(op, members)
        kind = type(op).__name__
        self.issued[kind] += 1
        self.bytes[kind] += size
        return size

    def add(self, other: Ledger) -> None:
        """Add another ledger's counts."""
        self.issued.update(other.issued)
        self.bytes.update(other.bytes)

    @property
    def total(self) -> int:
        """All bytes sent."""
        return sum(self.bytes.values())
