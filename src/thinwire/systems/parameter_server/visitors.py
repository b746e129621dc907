"""The leaders at a shard: each shows a ticket, becomes a member through the server, sends pieces and gets pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.systems.link.pair import Pair
from thinwire.systems.parameter_server.connection import Anything, Connection
from thinwire.systems.parameter_server.ending import join_all, unended
from thinwire.systems.parameter_server.messages import Ping
from thinwire.systems.parameter_server.shard_messages import Admit, Arrived, Dismiss, Give, Left, Piece
from thinwire.systems.parameter_server.slice_keeper import SliceKeeper


@dataclass(eq=False)
class Visitor:
    """One leader's connection. ``member``: 0 until the server admits it. ``newest``: number of its last piece."""

    ticket: int
    member: int = 0
    newest: int = -1
    connection: Connection | None = None

    def left(self) -> Left:
        """Return what the server is told at the end."""
        up, down = self.bytes()
        return Left(self.member, up, down)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes from it and to it."""
        assert self.connection is not None
        return self.connection.pair.received_bytes, self.connection.pair.sent_bytes


class Visitors:
    """Connections of the leaders. ``came`` may be called from any thread, everything else from the shard's thread.

    Args:
        tell: puts an event into the shard's queue, for :meth:`on`.

    Attributes:
        seconds: the time a piece may take beyond its bytes; applies to new connections.
        most_bytes: the largest piece accepted; applies to new connections.
    """

    def __init__(self, tell: Callable[[str, Any, Any], None]) -> None:
        self._tell = tell
        self._waiting: dict[int, Visitor] = {}  # by ticket
        self._members: dict[int, Visitor] = {}
        self._old: list[Connection] = []
        self.seconds, self.most_bytes = 10.0, 0

    def came(self, pair: Pair, ticket: int) -> None:
        """Note that a leader has connected. It may stay silent: the server knows whether it lives."""
        visitor = Visitor(ticket)
        visitor.connection = Connection(
            pair,
            channels=1,
            seconds=self.seconds,
            most_bytes=self.most_bytes,
            silent=True,
            deliver=lambda message: self._deliver(visitor, message),
            closed=lambda reason: self._tell("left", visitor, reason),
        )
        self._tell("came", visitor, None)  # first, so that it is known when the server admits the ticket
        visitor.connection.start().post(Ping())

    def _deliver(self, visitor: Visitor, message: Anything) -> None:
        """Check and forward a piece. Called in the connection's thread."""
        if not isinstance(message, Piece) or message.tensor is None:
            raise ValueError("a leader sends a shard something other than pieces: its connection is closed")
        if not visitor.member or message.member != visitor.member or message.number <= visitor.newest:
            raise ValueError("a leader sends another leader's piece, or one twice: its connection is closed")
        visitor.newest = message.number
        self._tell("piece", visitor, message)

    def on(self, what: str, visitor: Visitor, message: Any, keeper: SliceKeeper) -> list[Anything]:
        """Handle an event of ``tell``. Return the messages to the server."""
        if what == "came":
            self._waiting[visitor.ticket] = visitor
        elif what == "left":
            self._waiting.pop(visitor.ticket, None)
            if self._members.get(visitor.member) is visitor:
                del self._members[visitor.member]
                return [visitor.left()]
        elif self._members.get(visitor.member) is visitor:
            try:
                keeper.add(message.member, message.number, message.tensor)
            except ValueError:
                return self._dismiss(visitor.member)
            return [Arrived(visitor.member, message.number, *visitor.bytes())]
        return []

    def obey(self, message: Anything, keeper: SliceKeeper) -> list[Anything]:
        """Handle what the server says about members. Return the messages to the server."""
        if isinstance(message, Admit):
            visitor = self._waiting.pop(message.ticket, None)
            if visitor is None:  # it has already gone
                return [Left(message.member, 0, 0)]
            visitor.member = message.member
            self._members[message.member] = visitor
        elif isinstance(message, Dismiss):
            return self._dismiss(message.member)
        elif isinstance(message, Give):
            there = self._members.get(message.member)
            if there is not None and there.connection is not None:
                there.connection.post(keeper.piece(message.member, message.number))
        return []

    def _dismiss(self, member: int) -> list[Anything]:
        visitor = self._members.pop(member, None)
        if visitor is None or visitor.connection is None:
            return []
        visitor.connection.close()
        self._old = unended(self._old, visitor.connection)
        return [visitor.left()]

    def close(self, seconds: float) -> None:
        """Close all connections; wait up to ``seconds`` for their threads."""
        there = [v.connection for v in (*self._members.values(), *self._waiting.values()) if v.connection is not None]
        self._members, self._waiting = {}, {}
        for connection in there:
            connection.close()
        self._old = unended(self._old, *there)
        join_all(self._old, seconds)
