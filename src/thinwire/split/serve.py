"""The cloud's socket: one edge at a time, the next after bye; an edge that comes back takes its old place."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.split.errors import FrameError, LinkError, SessionError, SplitError
from thinwire.split.frames import Message
from thinwire.split.ledger import ByteLedger
from thinwire.split.link import DEFAULT_LIMIT
from thinwire.split.session import CloudEnd
from thinwire.split.tls import Credentials, check_plain
from thinwire.split.wire import HANDSHAKE_SECONDS, Wire


@dataclass
class Server:
    """Listens for edges and answers them.

    Attributes:
        cloud: the state machine behind it.
        host: to listen at.
        port: to listen on; 0: a free one, which ``port`` then names.
        credentials: for TLS; None: in the clear, on loopback or with ``insecure=True`` only.
        insecure: allow listening in the clear to other machines.
        hold_seconds: how long an edge whose connection was lost keeps its place against other edges.
        message_seconds: how long an edge may be silent within a message, or take nothing of one.
        limit: bytes of one message, received.
        ledger: bytes of all connections.
        say: called with a sentence for people when edges come, go or are refused.
    """

    cloud: CloudEnd
    host: str = "127.0.0.1"
    port: int = 0
    credentials: Credentials | None = None
    insecure: bool = False
    hold_seconds: float = 30.0
    message_seconds: float = 60.0
    limit: int = DEFAULT_LIMIT
    ledger: ByteLedger = field(default_factory=ByteLedger)
    say: Callable[[str], None] = lambda sentence: None
    _wire: Wire | None = None
    _lost_at: float = 0.0

    def __post_init__(self) -> None:
        if self.credentials is None:
            check_plain(self.host, self.insecure)
        try:
            self._listener = socket.create_server((self.host, self.port))
        except OSError as error:
            raise ValueError(f"cannot listen at {self.host} port {self.port}: {error}") from error
        self.port = self._listener.getsockname()[1]

    def serve(self, edges: int | None = 1, idle_seconds: float | None = None) -> None:
        """Answer until so many edges have said bye.

        Args:
            edges: how many; None: for ever.
            idle_seconds: how long nothing may come; None: any time.

        Raises:
            LinkError: nothing came for ``idle_seconds``.
        """
        self.say(f"listening at {self.host} port {self.port}{'' if self.credentials else ', in the clear'}")
        left = edges
        last = time.monotonic()
        while left is None or left > 0:
            waiting: list[socket.socket | Wire] = [self._listener] + ([self._wire] if self._wire is not None else [])
            ready, _, _ = select.select(waiting, [], [], 0.5)
            if not ready:
                if self._wire is not None and self._wire.middle and time.monotonic() - last > self.message_seconds:
                    self._lose("it fell silent within a message")
                if idle_seconds is not None and time.monotonic() - last > idle_seconds:
                    raise LinkError(f"no edge has said anything for {idle_seconds:g} s")
                continue
            last = time.monotonic()
            if self._listener in ready:
                self._accept()
            elif self._answer() and left is not None:
                left -= 1

    def _accept(self) -> None:
        """Take a new connection, if it may come: handshake, hello, answer."""
        try:
            connected, address = self._listener.accept()
        except OSError as error:  # it was gone before it was taken, or there are too many files open
            self.say(f"lost a connection: {error}")
            return
        wire = None
        try:
            wire = Wire(connected, self.credentials, server=True, ledger=self.ledger, limit=self.limit)
            hello = wire.receive(HANDSHAKE_SECONDS, "hello")
            if hello.kind != "hello" or hello.words is None:
                raise SessionError(f"a connection began with {hello.kind!r} instead of hello")
            name = wire.peer or str(hello.words.get("edge"))
            holder = self.cloud.edge
            held = self._wire is not None or time.monotonic() - self._lost_at < self.hold_seconds
            if holder and name != holder and held:
                sentence = f"the cloud is busy with edge {holder!r}; this one comes after it"
                wire.send(Message("error", words={"sentence": sentence, "busy": True}), HANDSHAKE_SECONDS)
                wire.close()
                return
            try:
                words = self.cloud.hello(hello.words, wire.peer)
            except SessionError as error:
                wire.send(Message("error", words={"sentence": str(error)}), HANDSHAKE_SECONDS)
                raise
            wire.send(Message("ready", words=words), HANDSHAKE_SECONDS)
        except (SplitError, OSError) as error:
            self.say(f"refused a connection from {address[0]}: {error}")
            (wire or connected).close()
            return
        if self._wire is not None:
            self._wire.close()
        self._wire = wire
        self.say(f"edge {self.cloud.edge!r} {'is back' if words['known'] else 'begins'}, step {words['resume']}")

    def _answer(self) -> bool:
        """What came from the present edge. Returns whether it was bye."""
        assert self._wire is not None
        try:
            request = self._wire.poll()
            if request is None:
                return False
            try:
                reply = self.cloud.handle(request)
            except SessionError as error:
                words = {"sentence": str(error)}
                self._wire.send(Message("error", request.step, request.sequence, words=words), self.message_seconds)
                self.say(f"refused edge {self.cloud.edge!r}: {error}")
                raise
            self._wire.send(reply, self.message_seconds)
        except (LinkError, FrameError, SessionError) as error:
            self._lose(str(error))
            return False
        if request.kind == "bye":
            self.say(f"bye after {request.step} steps")
            self._wire.close()
            self._wire = None
            return True
        return False

    def _lose(self, why: str) -> None:
        """The present edge's connection is over; it keeps its place for a while."""
        self.say(f"edge {self.cloud.edge!r} is gone: {why}")
        if self._wire is not None:
            self._wire.close()
        self._wire, self._lost_at = None, time.monotonic()

    def close(self) -> None:
        """Stop listening."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._listener.close()
