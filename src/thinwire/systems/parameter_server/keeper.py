"""Where the weights of a served model are kept: in the server itself or, see ``fleet``, in shard processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.messages import Grad, Message, Stop, Weights
from thinwire.systems.parameter_server.outer import Master
from thinwire.systems.parameter_server.packing import ServerEnd
from thinwire.systems.parameter_server.status import ShardStatus

Done = Callable[["Tensor | None"], None]
"""Called when an update has been made, with the new weights if they were asked for."""

Event = tuple[str, Any, Any]
"""An entry of the server's queue: (what, who, value)."""


class Keeper(Protocol):
    """What the server's process needs from the object that keeps the weights."""

    def read(self, message: Grad) -> Grad:
        """Check and decode a sum from a leader; called in the connection's thread. ``ValueError``: it is not valid."""

    def heard(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """Take a member's message; return the messages that are now complete, it or earlier ones."""

    def dress(self, member: int, message: Message) -> Message:
        """Return a message to a member with its tensor attached, if it carries one."""

    def admit(self, member: int, ticket: int) -> None:
        """Note a new member."""

    def forget(self, member: int) -> None:
        """Note that a member has gone."""

    def drop(self, tensor: object) -> None:
        """Free a sum that will not be used."""

    def apply(self, effect: Apply, show: bool, done: Done) -> None:
        """Make an update, now or in the background; then call ``done``, with the weights if ``show``."""

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        """Complete a checkpoint and write it. ``OSError``: it could not be written."""

    def tick(self, now: float) -> list[int]:
        """Return the members whose sums are overdue. Called several times per lease."""

    @property
    def ready(self) -> bool:
        """Whether the weights are there, so that nodes may join and training may end."""

    def hear(self, event: Event, now: float) -> Iterable[Message]:
        """Handle an event that does not come from a member; return messages for the state machine."""

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        """Wait for the final weights and return them, ``[D]``."""

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        """Wait until no checkpoint is being written."""

    def close(self, version: int | None) -> None:
        """Note that training has ended at ``version``; None: another server may continue it."""

    def traffic(self, member: int) -> tuple[int, int]:
        """Return the bytes from and to a member that did not go over the server's own connection."""

    @property
    def past(self) -> tuple[int, int]:
        """The same bytes, summed over members that have gone."""

    def shards(self) -> tuple[ShardStatus, ...]:
        """Return the status of each shard."""


class Whole:
    """Weights in the server's own process.

    Args:
        master: the weights and their optimizer.
        end: the server's side of the compression.
        saved: a checkpoint to continue from.
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
            raise ValueError("a sum arrived without its gradients, or gradients without their sum")
        return message if message.tensor is None else replace(message, tensor=self._end.sum(message.tensor))

    def heard(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """Return the message: all messages come complete and in order."""
        return (message,)

    def dress(self, member: int, message: Message) -> Message:
        if isinstance(message, Weights) and not message.same:
            tensor, delta = self._end.weights(member, self._snapshot)
            return replace(message, tensor=tensor, delta=delta)
        return replace(message, tensor=self._snapshot) if isinstance(message, Stop) else message

    def admit(self, member: int, ticket: int) -> None:
        """Do nothing."""

    def forget(self, member: int) -> None:
        self._end.forget(member)

    def drop(self, tensor: object) -> None:
        """Do nothing: no other process holds the sum."""

    def apply(self, effect: Apply, show: bool, done: Done) -> None:
        if self.master.apply(effect.contributions):
            self._snapshot = self.master.theta.clone()
        done(self._snapshot if show else None)

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        state = self.master.optimizer.state_dict()
        checkpoints.save(directory, replace(saved, theta=self.master.theta.detach(), optimizer=state))

    def tick(self, now: float) -> list[int]:
        """Return nothing: each connection notices by itself what is overdue."""
        return []

    def hear(self, event: Event, now: float) -> Iterable[Message]:
        """Return nothing: there are no such events."""
        return ()

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        return self.master.theta

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        """Return at once: ``save`` returns after writing."""

    def close(self, version: int | None) -> None:
        """Do nothing."""

    def traffic(self, member: int) -> tuple[int, int]:
        """Return zeros: there is only the server's own connection."""
        return 0, 0

    def shards(self) -> tuple[ShardStatus, ...]:
        return ()
