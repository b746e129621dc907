"""A leader's connection to the server: one connection or, with shards, one more to each shard, used as one."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

import torch

from thinwire.systems.link.errors import PairError
from thinwire.systems.link.hello import Badge
from thinwire.systems.link.meeting import Meeting, connect, split_address
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server.assembly import Assembly
from thinwire.systems.parameter_server.connection import SLOWEST, Anything, Connection
from thinwire.systems.parameter_server.ending import join_all
from thinwire.systems.parameter_server.messages import FRAME, Grad, Hello, Stop, Weights, encode
from thinwire.systems.parameter_server.packing import SumsOut
from thinwire.systems.parameter_server.shard_messages import LAST, Piece, Ticket

_POLL_SECONDS = 1.0


class Line:
    """The connection to a server that holds all weights. Sums and weights go in and out as flat tensors.

    Args:
        pair: the connection.
        sums: packs the sums that are posted.
        most_bytes: size of the largest tensor to accept.
        deliver, closed, announced, compose: see :class:`Connection`.
    """

    def __init__(
        self,
        pair: Pair,
        sums: SumsOut,
        *,
        most_bytes: int,
        deliver: Callable[[Anything], None],
        closed: Callable[[str], None],
        announced: Callable[[float], None],
        compose: Callable[[], Anything | None],
        channels: int = 0,
    ) -> None:
        self._sums, self._weights, self._deliver = sums, sums.weights_in(), deliver
        self.server = Connection(
            pair,
            channels=channels or sums.settings.channels,
            seconds=sums.settings.lease_seconds,
            most_bytes=most_bytes,
            deliver=self._came,
            closed=closed,
            announced=announced,
            compose=compose,
        )
        self.connections = [self.server]

    def start(self) -> None:
        """Start the threads; nothing is delivered before."""
        for connection in self.connections:
            connection.start()

    def post(self, message: Anything) -> None:
        """Queue a message for sending, in order. Never blocks."""
        if isinstance(message, Grad) and message.tensor is not None:
            (tensor,) = self._sums.pack(message.tensor)
            message = replace(message, tensor=tensor)
        self.server.post(message)

    def report_due(self) -> None:
        self.server.report_due()

    def finish(self) -> None:
        """Close once everything posted has been sent."""
        for connection in self.connections:
            connection.finish()

    def close(self) -> None:
        """Close now; ``closed`` is not called afterwards."""
        for connection in self.connections:
            connection.close()

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the threads have ended."""
        join_all(self.connections, seconds)

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return all(connection.ended for connection in self.connections)

    def overdue(self, now: float) -> bool:
        """Return whether announced weights are late; False here, because a single connection notices that by itself."""
        return False

    def _came(self, message: Anything) -> None:
        if isinstance(message, Weights) and message.tensor is not None:
            message = replace(message, tensor=self._weights.unpack(0, message.tensor, message.delta))
        self._deliver(message)


class SlicedLine(Line):
    """The connections to a server and its shards: frames go to the server, and one piece of every sum to each shard.

    Args:
        pair: to the server. shards: one pair to each shard, in order.
        lock: held in every call of ``deliver``.
    """

    def __init__(
        self,
        pair: Pair,
        shards: list[Pair],
        sums: SumsOut,
        *,
        lock: RLock,
        most_bytes: int,
        deliver: Callable[[Anything], None],
        closed: Callable[[str], None],
        announced: Callable[[float], None],
        compose: Callable[[], Anything | None],
    ) -> None:
        super().__init__(
            pair, sums, most_bytes=most_bytes, deliver=deliver, closed=closed, announced=announced, compose=compose,
            channels=1,
        )  # fmt: skip
        lease = sums.settings.lease_seconds
        self._lock, self._announced = lock, announced
        self._assembly = Assembly(len(shards), sums.settings.channels == 1)
        self._seconds = lease + sums.pieces[-1].stop * sums.dtype.itemsize / SLOWEST
        self.shards = [
            Connection(
                shard,
                channels=1,
                seconds=lease,
                most_bytes=most_bytes,
                deliver=lambda message, index=index: self._piece(index, message),  # type: ignore[misc]
                closed=lambda reason, index=index: closed(f"shard {index}: {reason}"),  # type: ignore[misc]
                announced=announced,
                silent=True,
            )
            for index, shard in enumerate(shards)
        ]
        self.connections += self.shards

    def post(self, message: Anything) -> None:
        """Queue a message for sending, in order; the pieces of a sum go to the shards."""
        if isinstance(message, Grad) and message.tensor is not None:
            for shard, piece in zip(self.shards, self._sums.pack(message.tensor)):
                shard.post(Piece(message.member, message.seq, False, piece))
            message = replace(message, tensor=None)
        self.server.post(message)

    def overdue(self, now: float) -> bool:
        return self._assembly.overdue(now)

    def _came(self, message: Anything) -> None:
        number = None
        if isinstance(message, Weights) and not message.same:
            number = message.grant
        elif isinstance(message, Stop):
            number = LAST
        with self._lock:
            now = time.monotonic()
            self._forward(self._assembly.message(message, number, self._seconds, now), now)

    def _piece(self, index: int, message: Anything) -> None:
        if not isinstance(message, Piece) or message.tensor is None:
            return  # a sign of life
        with self._lock:
            now = time.monotonic()
            tensor = self._weights.unpack(index, message.tensor, message.delta)
            self._forward(self._assembly.piece(message.number, index, tensor, now), now)

    def _forward(self, ready: list[tuple[Any, list[Any] | None]], now: float) -> None:
        if self._assembly.until is not None:
            self._announced(self._assembly.until - now)
        for message, pieces in ready:
            self._deliver(message if pieces is None else replace(message, tensor=torch.cat(pieces)))


class ShardsToCome(RuntimeError):
    """The server is still waiting for its shards."""


def shard_count(meeting: Meeting) -> int:
    """Return how many shards a server has or waits for."""
    return int(json.loads(meeting.note("shards"))["count"])


def reach(server: str, hello: Hello, badge: Badge, seconds: float) -> tuple[Pair, list[Pair]]:
    """Say HELLO to a server; if it has shards, first show a ticket to each of them.

    Args:
        server: ``host:port``.
        badge: of the node.
        seconds: the time each connection may take.

    Raises:
        NotAdmitted: the server or a shard does not let this node in.
        PairError: the server or a shard cannot be reached.
        ShardsToCome: the server still waits for shards; try again later.
    """
    meeting = Meeting(server, badge, seconds)
    end = time.monotonic() + _POLL_SECONDS
    while len((notes := json.loads(meeting.note("shards")))["places"]) < notes["count"]:
        if time.monotonic() > end:
            raise ShardsToCome(f"the server at {server} waits for its {notes['count']} shards")
        time.sleep(0.1)
        meeting.look()
    shards: list[Pair] = []
    try:
        ticket = 1 + secrets.randbits(61) if notes["count"] else 0
        for index, (host, port, fingerprint) in enumerate(notes["places"]):
            if isinstance(badge.trust, Credentials):
                badge = replace(badge, trust=badge.trust.pinned(fingerprint))
            shards.append(_show(host or split_address(server)[0], port, ticket, index, badge, seconds))
        return meeting.connect(encode(replace(hello, ticket=ticket))), shards
    except PairError:
        for shard in shards:
            shard.close()
        raise


def _show(host: str, port: int, ticket: int, index: int, badge: Badge, seconds: float) -> Pair:
    try:
        pair = connect(host, port, encode(Ticket(ticket)), badge, seconds)
        try:
            pair.receive_frame(FRAME.size, seconds)  # the shard answers once it knows the ticket
        except PairError:
            pair.close()
            raise
        return pair
    except PairError as error:
        raise type(error)(f"shard {index} at {host}:{port}: {error}") from error
