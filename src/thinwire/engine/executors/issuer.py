"""What both executors share: issuing ops on lanes with a ledger, and the record of a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.core.collectives.exchange import Lanes, Ledger, Pending, issue
from thinwire.core.program.ops import Collective, Program, Scope

MakeProgram = Callable[[int], Program]
"""Bucket index -> its program; called in the thread that runs it, once the bucket's gradients are there."""


@dataclass
class Failure:
    """An error, and the bucket and op where it happened."""

    error: BaseException
    bucket: int | None
    where: str


class OpIssuer:
    """Issues ops on their lanes and records them in the ledger."""

    def __init__(self, lanes: Lanes, ledger: Ledger, note: Callable[[Collective, Scope, int, int], None]) -> None:
        self.lanes, self.ledger, self._note = lanes, ledger, note

    def issue(self, op: Collective, scope: Scope, round_: int, bucket: int, purpose: str = "bucket") -> Pending:
        """Start an op on its lane."""
        lane = self.lanes.get(purpose, scope, round_)
        self.ledger.record(op, lane.size)
        if purpose == "bucket":
            self._note(op, scope, round_, bucket)
        return issue(op, lane, tag=bucket)
