"""The result of a lab run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from thinwire.lab.faults import Happening


@dataclass(frozen=True)
class LabResult:
    """How the ranks ended, and the traffic on the links.

    Attributes:
        exit_code: the worst code of the ranks that ended by themselves; 124 if time ran out.
        exit_codes: one per rank; 128 + signal for a rank that a signal ended. An intended death does not
            count in ``exit_code``.
        seconds: from the start of the first rank to the end of the last.
        emulated: False if the ranks ran on plain loopback, without links.
        note: how it ran, in one sentence.
        sent_bytes: per node, bytes its interface sent, with headers; an offloaded packet counts its headers once.
            All zero on plain loopback.
        received_bytes: per node, bytes its interface received.
        congestion_control: TCP's congestion control on the links; None on plain loopback.
        happenings: what happened to ranks, in order.
    """

    exit_code: int
    exit_codes: tuple[int, ...]
    seconds: float
    emulated: bool
    note: str
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    congestion_control: str | None = None
    happenings: tuple[Happening, ...] = ()

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))
