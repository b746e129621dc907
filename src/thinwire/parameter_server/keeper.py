"""Who keeps the weights of a served model: the server itself, or (``fleet``) shard processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from thinwire.parameter_server import checkpoint as checkpoints
from thinwire.parameter_server.effects import Apply
from thinwire.parameter_server.messages import Grad, Message, Stop, Weights
from thinwire.parameter_server.outer import Master
from thinwire.parameter_server.packing import ServerEnd
from thinwire.parameter_server.status import ShardStatus

Done = Callable[["Tensor | None"], None]
"""Called when an update is made, with the new weights if they were asked for."""

Event = tuple[str, Any, Any]
"""An entry of the server's queue: what, who, value."""


class Keeper(Protocol):
    """What the server's process asks of who keeps the weights."""

    def read(self, message: Grad) -> Grad:
        """A sum as it came from a leader; called in the connection's thread. ``ValueError``: it does not fit."""

    def heard(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """A member's message: what of it and of those before is whole."""

    def dress(self, member: int, message: Message) -> Message:
        """A message to a member, with what it carries."""

    def admit(self, member: int, ticket: int) -> None:
        """There is a new member."""

    def forget(self, member: int) -> None:
        """A member has gone."""

    def drop(self, tensor: object) -> None:
        """A sum is not used."""

    def apply(self, effect: Apply, show: bool, done: Done) -> None:
        """Make an update, at once or while others go on; then call ``done``, with the weights if ``show``."""

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        """Complete a checkpoint and write it. ``OSError``: it could not be written."""

    def tick(self, now: float) -> list[int]:
        """To be called several times per lease. Returns the members whose sums have not come whole in time."""

    @property
    def ready(self) -> bool:
        """Whether the weights are there, so that nodes may come and training may end."""

    def hear(self, event: Event, now: float) -> Iterable[Message]:
        """An event of another kind than members make. Returns what the state machine is to be told."""

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        """The weights, ``[D]``, at the end; waits for them."""

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        """Wait until no checkpoint is being written."""

    def close(self, version: int | None) -> None:
        """Training has ended at ``version``; None: another server may go on with it."""

    def traffic(self, member: int) -> tuple[int, int]:
        """Bytes from a member and to it, other than the server's own connection has carried."""

    @property
    def past(self) -> tuple[int, int]:
        """The same of members who have gone."""

    def shards(self) -> tuple[ShardStatus, ...]:
        """Of each shard."""


class Whole:
    """Weights in the server's own process.

    Args:
        master: the weights and their optimizer.
        end: this end of the wire.
        saved: a checkpoint to go on from.
    """

    past = (0, 0)
    ready = True

    def __init__(self, master: Master, end: ServerEnd, saved: checkpoints.Saved | None = None) -> None:
        self.master, self._end = master, end
        if saved is not None:
            master.restore(saved.theta, saved.optimizer)
        self._snapshot = master.theta.clone()

    def read(self, message: Grad) -> Grad:
        if bool(message.rows) != (message.tensor is not None):
            raise ValueError("a sum came without its gradients, or gradients without their sum")
        return message if message.tensor is None else replace(message, tensor=self._end.sum(message.tensor))

    def heard(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """Everything comes whole, and in order."""
        return (message,)

    def dress(self, member: int, message: Message) -> Message:
        if isinstance(message, Weights) and not message.same:
            tensor, delta = self._end.weights(member, self._snapshot)
            return replace(message, tensor=tensor, delta=delta)
        return replace(message, tensor=self._snapshot) if isinstance(message, Stop) else message

    def admit(self, member: int, ticket: int) -> None:
        """Nothing is to be done."""

    def forget(self, member: int) -> None:
        self._end.forget(member)

    def drop(self, tensor: object) -> None:
        """There is no other holder."""

    def apply(self, effect: Apply, show: bool, done: Done) -> None:
        if self.master.apply(effect.contributions):
            self._snapshot = self.master.theta.clone()
        done(self._snapshot if show else None)

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        state = self.master.optimizer.state_dict()
        checkpoints.save(directory, replace(saved, theta=self.master.theta.detach(), optimizer=state))

    def tick(self, now: float) -> list[int]:
        """A connection knows by itself what is late."""
        return []

    def hear(self, event: Event, now: float) -> Iterable[Message]:
        """There are no others."""
        return ()

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        return self.master.theta

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        """A checkpoint is written before ``save`` returns."""

    def close(self, version: int | None) -> None:
        """Nothing is to be done."""

    def traffic(self, member: int) -> tuple[int, int]:
        """There is only the server's connection."""
        return 0, 0

    def shards(self) -> tuple[ShardStatus, ...]:
        return ()
