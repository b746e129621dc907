"""Both ends in one process, without a connection: the quickest way to try a plan, and the reference for the tests."""

from __future__ import annotations

from pathlib import Path

from thinwire.systems.split.edge import EdgeEnd
from thinwire.systems.split.frames import Message, count
from thinwire.systems.split.halves import Back, Front, by_role
from thinwire.systems.split.ledger import ByteLedger
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.session import CloudEnd


class LocalPair(EdgeEnd):
    """An edge with its cloud in the same process. Codecs, sessions and checkpoints work as on two machines.

    Attributes:
        front: one half, whichever end has it.
        back: the other half.
        cloud: the cloud's end.
        ledger: what would have been sent, with frame headers but without TLS.
    """

    def __init__(
        self,
        front: Front,
        back: Back,
        recipe: Recipe,
        total: int,
        checkpoint_dir: Path | None = None,
        pair: str = "local",
    ) -> None:
        folders = (None, None) if checkpoint_dir is None else (checkpoint_dir / "edge", checkpoint_dir / "cloud")
        self.front, self.back = front, back
        held = by_role(front, back)
        super().__init__(held["edge"], pair, recipe, total, checkpoint_dir=folders[0])
        self.cloud = CloudEnd(held["cloud"], pair, recipe, folders[1])
        self.ledger = ByteLedger()
        self.open(self._counted, self.cloud.hello(self.hello()))

    def _counted(self, request: Message) -> Message:
        count(request, self.ledger, self.ledger.sent)
        reply = self.cloud.handle(request)
        count(reply, self.ledger, self.ledger.received)
        return reply
