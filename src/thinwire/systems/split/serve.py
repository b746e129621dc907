"""The cloud's socket: one edge at a time, the next one after bye; an edge that reconnects gets its place back."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.core.sockets import not_for_children, readable
from thinwire.systems.link.duplex import Duplex
from thinwire.systems.link.errors import PairError
from thinwire.systems.link.listener import HELLO_SECONDS, ListeningPort
from thinwire.systems.link.tls import Credentials
from thinwire.systems.split.edge import printable
from thinwire.systems.split.errors import FrameError, LinkError, SessionError, SplitError
from thinwire.systems.split.frames import Fields, Message
from thinwire.systems.split.ledger import ByteLedger
from thinwire.systems.split.link import DEFAULT_LIMIT, check_plain
from thinwire.systems.split.session import CloudEnd
from thinwire.systems.split.wire import FrameConnection

MOST = 64


@dataclass
class _Newcomer:
    """A connection until its hello has been answered.

    Attributes:
        duplex: its socket.
        ledger: its bytes until then.
        wire: set once it exists.
        hello: set once it was received; None: there will be none, for the reason in ``error``.
        answered: set when the newcomer has been accepted or refused.
    """

    duplex: Duplex
    ledger: ByteLedger = field(default_factory=ByteLedger)
    wire: FrameConnection | None = None
    hello: Fields | None = None
    error: Exception | None = None
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass
class CloudServer:
    """Listens for edges and answers them.

    Attributes:
        cloud: the state machine behind it.
        host: to listen at.
        port: to listen on; 0: a free one is chosen, and ``port`` is set to it.
        credentials: for TLS; None: unencrypted, only on loopback or with ``insecure=True``.
        insecure: allow unencrypted connections from other machines.
        hold_seconds: how long an edge whose connection was lost keeps its place against other edges.
        message_seconds: how long an edge may be silent within a message, or accept nothing of one.
        hello_seconds: how long a new connection may take for the TLS handshake and hello together.
        limit: most bytes of a received message; until its hello is accepted a connection may send 64 KiB.
        ledger: bytes of all connections.
        say: called with a sentence for the user when edges come, go or are refused.
    """

    cloud: CloudEnd
    host: str = "127.0.0.1"
    port: int = 0
    credentials: Credentials | None = None
    insecure: bool = False
    hold_seconds: float = 30.0
    message_seconds: float = 60.0
    hello_seconds: float = HELLO_SECONDS
    limit: int = DEFAULT_LIMIT
    ledger: ByteLedger = field(default_factory=ByteLedger)
    say: Callable[[str], None] = lambda sentence: None
    _wire: FrameConnection | None = None
    _lost_at: float = 0.0
    _heard_at: float = 0.0

    def __post_init__(self) -> None:
        if self.credentials is None:
            check_plain(self.host, self.insecure)
        self._heard: queue.SimpleQueue[_Newcomer] = queue.SimpleQueue()
        self._serving = threading.RLock()
        # readable when a newcomer's hello has been read, or at an end of file, when this server is closed
        self._bell, self._ring = map(not_for_children, socket.socketpair())
        try:
            self._door = ListeningPort(self.port, self.host, self._hear, self.hello_seconds, MOST)
        except (PairError, ValueError) as error:
            self._bell.close()
            self._ring.close()
            raise ValueError(f"cannot listen at {self.host}: {error}") from error
        self.port = self._door.port
        self._door.open()

    def serve(self, edges: int | None = 1, idle_seconds: float | None = None) -> None:
        """Answer until that many edges have said bye, or ``close`` is called from another thread.

        Args:
            edges: how many; None: forever.
            idle_seconds: how long all edges may be silent; None: without limit.

        Raises:
            LinkError: no edge has said anything for ``idle_seconds``.
        """
        self._say(f"listening at {self.host} port {self.port}{'' if self.credentials else ', in the clear'}")
        with self._serving:
            self._serve(edges, idle_seconds)

    def _serve(self, left: int | None, idle_seconds: float | None) -> None:
        self._heard_at = time.monotonic()
        while left is None or left > 0:
            waiting: list[FrameConnection | socket.socket] = [self._bell]
            if self._wire is not None:
                waiting.append(self._wire)
            ready = readable(waiting, 0.5)
            if self._wire is not None and self._wire in ready:  # before newcomers, one of whom is handled per turn
                if self._answer() and left is not None:
                    left -= 1
                self._heard_at = time.monotonic()
            if self._bell in ready:
                if not self._bell.recv(1):
                    return
                newcomer = self._heard.get()
                self._admit(newcomer)
                newcomer.answered.set()
            silent = time.monotonic() - self._heard_at
            if self._wire is not None and self._wire.middle and silent > self.message_seconds:
                self._lose("it fell silent within a message")
            if idle_seconds is not None and silent > idle_seconds:
                raise LinkError(f"no edge has sent anything for {idle_seconds:g} s")

    def _hear(self, duplex: Duplex, end: float) -> None:
        """Read a newcomer's hello, then wait until it is answered or closed to make room. Runs in its own thread."""
        newcomer = _Newcomer(duplex)
        try:
            newcomer.wire = FrameConnection(
                duplex, self.credentials, ledger=newcomer.ledger, limit=self.limit, seconds=self.hello_seconds
            )
            hello = newcomer.wire.receive(self.hello_seconds, "hello")
            if hello.kind != "hello" or hello.fields is None:
                raise SessionError(f"a connection began with {hello.kind!r} instead of hello")
            newcomer.hello = hello.fields
        except Exception as error:  # whatever a stranger sends must not end the cloud
            newcomer.error = error
        self._heard.put(newcomer)
        with contextlib.suppress(OSError):  # the cloud has closed
            self._ring.send(b".")
        while not newcomer.answered.wait(0.5) and not duplex.closed:
            pass

    def _admit(self, newcomer: _Newcomer) -> None:
        """Answer a newcomer's hello, and accept it if it may come."""
        self._door.forget(newcomer.duplex)  # from here on it is not closed to make room
        wire = newcomer.wire
        if wire is None or newcomer.hello is None:
            self._refuse(newcomer, newcomer.error)
            return
        name = wire.peer or str(newcomer.hello.get("edge"))
        holder = self.cloud.edge
        held = self._wire is not None or time.monotonic() - self._lost_at < self.hold_seconds
        try:
            if holder and name != holder and held:
                sentence = f"the cloud is busy with edge {printable(holder)!r}; this one has to wait"
                wire.send(Message("error", fields={"sentence": sentence, "busy": True}), HELLO_SECONDS)
                self._close(newcomer)
                return
            try:
                fields = self.cloud.hello(newcomer.hello, wire.peer)
            except SessionError as error:
                wire.send(Message("error", fields={"sentence": printable(error)}), HELLO_SECONDS)
                raise
            wire.send(Message("ready", fields=fields), HELLO_SECONDS)
        except (SplitError, OSError) as error:
            self._refuse(newcomer, error)
            return
        self.ledger.add(newcomer.ledger)
        wire.admit(self.ledger)
        if self._wire is not None:
            self._wire.close()
        self._wire, self._heard_at = wire, time.monotonic()
        self._say(f"edge {self.cloud.edge!r} {'is back' if fields['known'] else 'begins'}, step {fields['resume']}")

    def _refuse(self, newcomer: _Newcomer, why: Exception | None) -> None:
        self._say(f"refused a connection from {newcomer.duplex.host}: {why}")
        self._close(newcomer)

    def _close(self, newcomer: _Newcomer) -> None:
        newcomer.duplex.close()
        self.ledger.add(newcomer.ledger)

    def _answer(self) -> bool:
        """Handle a request from the current edge. Return whether it was bye."""
        assert self._wire is not None
        try:
            request = self._wire.poll()
            if request is None:
                return False
            try:
                reply = self.cloud.handle(request)
            except SessionError as error:
                fields = {"sentence": printable(error)}
                self._wire.send(Message("error", request.step, request.sequence, fields=fields), self.message_seconds)
                self._say(f"refused edge {self.cloud.edge!r}: {error}")
                raise
            self._wire.send(reply, self.message_seconds)
        except (LinkError, FrameError, SessionError) as error:
            self._lose(str(error))
            return False
        if request.kind == "bye":
            self._say(f"bye after {request.step} steps")
            self._wire.close()
            self._wire = None
            return True
        return False

    def _lose(self, why: str) -> None:
        """Note that the current edge's connection has ended; the edge keeps its place for a while."""
        self._say(f"edge {self.cloud.edge!r} is gone: {why}")
        if self._wire is not None:
            self._wire.close()
        self._wire, self._lost_at = None, time.monotonic()

    def _say(self, sentence: str) -> None:
        """Pass a sentence on; it may contain text from a stranger."""
        self.say(printable(sentence))

    def close(self) -> None:
        """Close all connections. From another thread, first wait until the request being served is answered."""
        self._door.close()
        self._ring.close()
        with self._serving:
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            while not self._heard.empty():
                self._heard.get().duplex.close()
            self._bell.close()

    def __enter__(self) -> CloudServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
