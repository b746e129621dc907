"""A shard's own slice: the weights and their optimizer, the sums received for them, and the checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.connection import Anything
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.outer import Master, Outer
from thinwire.systems.parameter_server.packing import ServerEnd
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard_messages import (
    LAST,
    Discard,
    Dismiss,
    Enlisted,
    Kept,
    Made,
    Piece,
    Save,
    Show,
    Update,
)
from thinwire.systems.parameter_server.slices import slices

logger = logging.getLogger("thinwire")


class SliceKeeper:
    """The state of a shard, without sockets: takes the server's messages and returns the answers.

    Args:
        settings, layout: the server's.
        outer: makes the optimizer.
        index, count: number of the slice, and how many there are.
        full: number of gradients of a whole round, as the server counts them.
        checkpoint_dir: for checkpoints.

    Attributes:
        version: of the weights.
        held: sums that wait for an update, by (member, seq).
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        outer: Outer,
        index: int,
        count: int,
        full: int,
        checkpoint_dir: str | Path | None = None,
    ) -> None:
        self.settings, self.layout, self.outer, self.version = settings, layout, outer, -1
        self._index, self._count, self._full, self._directory, self._run = index, count, full, checkpoint_dir, 0
        piece = slices(layout.numel, count)[index]
        self._numel = piece.stop - piece.start
        self._end = ServerEnd(settings, self._numel, layout.dtype)
        self._master: Master | None = None
        self._snapshot: Tensor | None = None
        self.held: dict[tuple[int, int], Tensor] = {}

    @property
    def master(self) -> Master:
        """The weights and their optimizer."""
        if self._master is None:
            raise RuntimeError("this shard has no weights yet")
        return self._master

    @property
    def weights(self) -> Tensor:
        """The weights of the current version; this tensor is never modified."""
        assert self._snapshot is not None
        return self._snapshot

    def on(self, message: Anything) -> list[Anything]:
        """Handle a message from the server and return the answers.

        Raises:
            ValueError: a checkpoint is missing or does not fit.
        """
        if isinstance(message, Enlisted):
            self._begin(message)
            return [Made(self.version)]
        if isinstance(message, Update):
            self._update(message)
            return [Made(self.version, self.weights if message.show else None)]
        if isinstance(message, Show):
            return [Made(self.version, self.weights)]
        if isinstance(message, Save):
            return [Kept(self.version, failed=not self._save(message.whole))]
        if isinstance(message, Discard):
            self.held.pop((message.member, message.seq), None)
        elif isinstance(message, Dismiss):
            kept = {(term.member, term.seq) for term in message.rows}
            self.held = {name: x for name, x in self.held.items() if name[0] != message.member or name in kept}
            self._end.forget(message.member)
        return []

    def _begin(self, message: Enlisted) -> None:
        self.version, self._run = message.version, message.run
        if message.tensor is not None:
            if self._directory is not None and checkpoints.kept_in(self._directory, self._index).found():
                raise ValueError(
                    f"{self._directory} has checkpoints of shard {self._index} but the server starts over: give an "
                    "empty directory, or give the server the --checkpoint-dir that it had"
                )
            theta = message.tensor.view(self.layout.dtype)
            self._master = Master(theta, self.outer, self.settings, self._full)
        else:
            if self._directory is None:
                raise ValueError(f"the server resumes from a checkpoint: give shard {self._index} its --checkpoint-dir")
            saved = checkpoints.load_slice(self._directory, message.version, self._index, self._count, message.run)
            if saved.layout != self.layout.to_json():
                self.layout.check(Layout.from_json(saved.layout))
            self._master = Master(saved.theta, self.outer, self.settings, self._full)
            self._master.restore(saved.theta, saved.optimizer)
        if self._master.theta.numel() != self._numel:
            raise ValueError(f"{self._master.theta.numel()} elements arrived, shard {self._index} has {self._numel}")
        self._snapshot = self._master.theta.clone()

    def _update(self, message: Update) -> None:
        terms = [(self.held.pop((term.member, term.seq)), term.scale) for term in message.rows]
        if terms:
            self.master.step(terms, message.divisor, message.factor)
            self._snapshot = self.master.theta.clone()
        self.version = message.version + 1

    def _save(self, whole: int) -> bool:
        """Write a checkpoint; return whether it was written."""
        assert self._directory is not None
        master = self.master
        saved = checkpoints.Saved(
            master.theta.detach(), master.optimizer.state_dict(), self.version, 0, {}, {}, self.layout.to_json(),
            None, self._count, self._index, self._run,
        )  # fmt: skip
        try:
            checkpoints.save(self._directory, saved, whole if whole >= 0 else None)
        except (OSError, ValueError) as error:
            logger.warning("%s", error)
            return False
        return True

    # --- leaders --------------------------------------------------------------------------------------------------

    def add(self, member: int, seq: int, message: Tensor) -> None:
        """Store a piece of a sum that has arrived as bytes.

        Raises:
            ValueError: its length is wrong.
        """
        self.held[member, seq] = self._end.sum(message)

    def piece(self, member: int, number: int) -> Piece:
        """Return the current weights for a member; the final ones are not compressed."""
        if number == LAST:
            return Piece(member, number, False, self.weights)
        tensor, delta = self._end.weights(member, self.weights)
        return Piece(member, number, delta, tensor)
