"""The server's connections to leaders: to those that said HELLO and wait, and to members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from thinwire.systems.link.errors import PairError
from thinwire.systems.link.pair import Pair
from thinwire.systems.parameter_server.connection import Anything, Connection
from thinwire.systems.parameter_server.ending import join_all, unended
from thinwire.systems.parameter_server.keeper import Keeper
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.messages import Buffers, Grad, Hello, Refused, encode
from thinwire.systems.parameter_server.packing import most_bytes
from thinwire.systems.parameter_server.settings import Settings


class Links:
    """The open connections. Everything except the calls of ``tell`` happens in the server's one thread.

    Args:
        settings, layout: of the run.
        keeper: reads sums, and is told when members come and go.
        tell: puts an event into the server's queue: what ("message", "buffers", "expect", "gone"), member, value.
    """

    def __init__(
        self, settings: Settings, layout: Layout, keeper: Keeper, tell: Callable[[str, Any, Any], None]
    ) -> None:
        self._settings, self._layout, self._keeper, self._tell = settings, layout, keeper, tell
        self.members: dict[int, Connection] = {}
        self._coming: dict[tuple[int, int], tuple[Pair, int]] = {}  # by node and instance, with the ticket
        self._old: list[Connection] = []
        self._past = [0, 0]  # bytes of members that have gone

    def hold(self, pair: Pair, hello: Hello) -> None:
        """Keep the connection of a leader that said HELLO, replacing an earlier one of the same process."""
        self.turn_away(hello.node, hello.instance)
        self._coming[hello.node, hello.instance] = pair, hello.ticket

    def turn_away(self, node: int, instance: int, reason: int = 0) -> None:
        """Close the connection of a waiting leader, after sending the reason if there is one."""
        pair, _ = self._coming.pop((node, instance), (None, 0))
        if pair is None:
            return
        if reason:
            with contextlib.suppress(PairError):
                pair.send_frame(encode(Refused(node, reason)))
        pair.close()

    def open(self, member: int, node: int, instance: int) -> None:
        """Make a waiting leader a member."""
        pair, ticket = self._coming.pop((node, instance), (None, 0))
        if pair is None:
            return
        self._keeper.admit(member, ticket)
        tell, keeper, buffers = self._tell, self._keeper, self._layout.buffers

        def deliver(message: Anything) -> None:
            if getattr(message, "member", None) != member:
                raise ValueError("a node speaks for another: its connection is closed")
            if isinstance(message, Buffers):
                tell("buffers", member, buffers.read(message.tensor))
                return
            tell("message", member, keeper.read(message) if isinstance(message, Grad) else message)

        self.members[member] = Connection(
            pair,
            channels=1 if keeper.shards() else self._settings.channels,  # only frames: an Assembly orders them
            seconds=self._settings.lease_seconds,
            most_bytes=most_bytes(self._settings, self._layout),
            deliver=deliver,
            closed=lambda reason: tell("gone", member, reason),
            announced=lambda seconds: tell("expect", member, seconds),
        ).start()

    def forget(self, member: int) -> None:
        """Close the connection of a member that has gone."""
        connection = self.members.pop(member, None)
        self._keeper.forget(member)
        if connection is not None:
            self._old = unended(self._old, connection)
            self._past[0] += connection.pair.received_bytes
            self._past[1] += connection.pair.sent_bytes
            connection.close()

    def finish(self, seconds: float) -> None:
        """Close all connections once what was posted is sent, after ``seconds`` at the latest."""
        for node, instance in list(self._coming):
            self.turn_away(node, instance)
        for connection in self.members.values():
            connection.finish()
        join_all([*self.members.values(), *self._old], seconds, least=0.1)

    def traffic(self) -> dict[int, tuple[int, int]]:
        """Return, for each member, the bytes from it and to it over all of its connections."""
        rows = {}
        for number, connection in list(self.members.items()):
            up, down = self._keeper.traffic(number)
            rows[number] = connection.pair.received_bytes + up, connection.pair.sent_bytes + down
        return rows

    def past(self) -> tuple[int, int]:
        """Return the same two sums for all members that have gone."""
        up, down = self._keeper.past
        return self._past[0] + up, self._past[1] + down
