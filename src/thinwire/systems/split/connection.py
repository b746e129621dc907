"""The two ends over a socket: `CloudClient` is the edge's one outgoing connection, `CloudServer` listens for edges.

If a connection is lost, the edge reconnects, says hello with the same session, and repeats the request that has no
reply yet; the cloud answers a repeated request from its saved reply. So a lost connection leaves no half-applied step.
Every byte through the socket is counted.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from thinwire.core.errors import NotAdmitted, PairError, PairTimeout
from thinwire.core.sockets import not_for_children, readable
from thinwire.core.tls import Credentials
from thinwire.systems.link.duplex import Duplex, dial, end_of
from thinwire.systems.link.hello import is_loopback
from thinwire.systems.link.listener import HELLO_SECONDS, ListeningPort, check_port
from thinwire.systems.split.ends import CloudEnd, EdgeEnd, printable
from thinwire.systems.split.errors import FrameError, LinkError, LinkTimeout, SessionError, SplitError, TrustError
from thinwire.systems.split.frames import ByteLedger, Fields, Message, MessageReader, encode

DEFAULT_LIMIT = 1 << 28  # bytes of one message
MOST = 64  # connections that have not said hello
_BURST = 1 << 18  # whole TLS records of 16 KiB
_HELLO_BYTES = 1 << 16
_BETWEEN_TRIES = 0.2


def check_plain(host: str, insecure: bool) -> None:
    """Raise ``ValueError`` for a connection to another machine without TLS, unless ``insecure``."""
    if not insecure and not is_loopback(host):
        raise ValueError(
            f"no keys for a connection with {host}: give --keys (thinwire keys new makes them), or --insecure to send "
            "everything in the clear"
        )


class FrameConnection:
    """Messages as frames, blocking, with a deadline for every operation.

    Without a ``host`` this end is the cloud. Until `admit` it accepts at most 64 KiB, within ``seconds`` together with
    the TLS handshake.
    """

    def __init__(
        self, duplex: Duplex, credentials: Credentials | None, *, host: str | None = None, ledger: ByteLedger,
        limit: int, seconds: float,
    ) -> None:  # fmt: skip
        self._duplex, self._ledger, self._limit, self._seconds = duplex, ledger, limit, seconds
        self._reader = MessageReader(limit if host else min(limit, _HELLO_BYTES), ledger)
        self._end = end_of(seconds)
        self._ready: deque[Message] = deque()
        self._sent = self._received = 0
        try:
            if credentials is not None:
                with self._lost("the TLS handshake", seconds):
                    duplex.secure(credentials, self._end, host)
        finally:
            self._count_tls(0, 0)
        if host:
            self._end = math.inf

    @property
    def peer(self) -> str | None:
        return self._duplex.shown.name if self._duplex.shown else None

    def admit(self, ledger: ByteLedger) -> None:
        """Accept the hello: from now on messages may be long and have no common deadline; count them in ``ledger``."""
        self._end, self._reader.limit = math.inf, self._limit
        self._ledger = self._reader.ledger = ledger

    def fileno(self) -> int:
        return self._duplex.fileno()

    def send(self, message: Message, seconds: float) -> None:
        """Send a whole message; the other end may take ``seconds`` for each 256 KiB."""
        waiting = bytearray()  # frames share TLS records, whose overhead is 22 bytes each
        for piece in encode(message, self._ledger):
            waiting += piece
            while len(waiting) > _BURST:
                self._write(waiting[:_BURST], seconds)
                del waiting[:_BURST]
        self._write(waiting, seconds)

    def receive(self, seconds: float, waiting_for: str = "a message") -> Message:
        """Return the next message; the other end may be silent for ``seconds``. ``waiting_for`` is for the error."""
        while not self._ready:
            self._read(seconds, waiting_for)
        return self._ready.popleft()

    def poll(self) -> Message | None:
        """Read from a readable socket; return the next message if it is complete. Raises as ``receive`` does."""
        if not self._ready:
            self._read(1.0, "a request")
        return self._ready.popleft() if self._ready else None

    @property
    def middle(self) -> bool:
        return self._reader.middle

    def close(self) -> None:
        self._duplex.close()

    def _write(self, plain: bytearray, seconds: float) -> None:
        with self._lost("the other end to accept bytes", seconds):
            self._duplex.write(plain, end_of(seconds))
        self._count_tls(len(plain), 0)

    def _read(self, seconds: float, waiting_for: str) -> None:
        with self._lost(waiting_for, seconds):
            plain = self._duplex.read_some(min(end_of(seconds), self._end))
        self._count_tls(0, len(plain))
        self._ready.extend(self._reader.feed(plain))

    def _count_tls(self, sent: int, received: int) -> None:
        self._ledger.sent["tls"] += self._duplex.sent - self._sent - sent
        self._ledger.received["tls"] += self._duplex.received - self._received - received
        self._sent, self._received = self._duplex.sent, self._duplex.received

    @contextlib.contextmanager
    def _lost(self, waiting_for: str, seconds: float) -> Iterator[None]:
        try:
            yield
        except NotAdmitted as error:
            raise TrustError(str(error)) from error
        except PairTimeout as error:
            if self._end < math.inf:
                raise LinkTimeout(f"{waiting_for} did not finish within {self._seconds:g} s") from error
            raise LinkTimeout(f"no progress for {seconds:g} s while waiting for {waiting_for}") from error
        except PairError as error:
            raise LinkError(f"the connection was lost while waiting for {waiting_for}: {error}") from error


@dataclass
class CloudClient(contextlib.AbstractContextManager["CloudClient"]):
    """A connection from an edge to its cloud, with alternating requests and replies.

    Attributes:
        host, port: of the cloud.
        credentials: for TLS; None: unencrypted, only on loopback or with ``insecure=True``.
        insecure: allow an unencrypted connection to another machine.
        receive_seconds: how long the cloud may be silent before the connection counts as lost; the second time in a row
            raises `LinkTimeout`.
        reconnect_seconds: how long to try again after the connection was lost.
        limit: most bytes of a received message.
        ledger: bytes of all connections.
        reconnects: how often the connection was lost and re-established.
    """

    host: str
    port: int
    credentials: Credentials | None = None
    insecure: bool = False
    receive_seconds: float = 60.0
    reconnect_seconds: float = 30.0
    limit: int = DEFAULT_LIMIT
    ledger: ByteLedger = field(default_factory=ByteLedger)
    reconnects: int = 0
    _wire: FrameConnection | None = None
    _edge: EdgeEnd | None = None

    def __post_init__(self) -> None:
        if self.credentials is None:
            check_plain(self.host, self.insecure)
        check_port(self.port, 1)

    def attach(self, edge: EdgeEnd) -> None:
        """Connect an edge and agree on the step to continue from.

        Raises:
            LinkError: no connection within ``reconnect_seconds``; `TrustError`: the other end cannot be trusted.
            SessionError: the ends do not match.

        Warns:
            UserWarning: the plan has the front in the cloud, so the edge's inputs will leave it.
        """
        plan = edge.half.plan
        if plan.front_on == "cloud":
            warnings.warn(str(plan.leaves), stacklevel=2)
        self._edge = edge
        edge.open(self.call, self._connect(edge, time.monotonic() + self.reconnect_seconds))

    def call(self, request: Message) -> Message:
        """Send a request and wait for its reply, over as many connections as it takes.

        Raises:
            LinkError: the connection was not re-established in time; `LinkTimeout`: the cloud was silent.
            SessionError, FrameError: the other end has changed, or sent something invalid twice in a row.
        """
        lost: SplitError | None = None
        deadline = 0.0
        while True:
            wire = self._wire or self._come_back(lost, deadline)
            try:
                wire.send(request, self.receive_seconds)
                return wire.receive(self.receive_seconds, f"the reply to {request.kind!r} of step {request.step}")
            except (LinkError, FrameError) as error:  # a frame that is not valid may have been damaged on the way
                self.close()
                same = isinstance(error, (LinkTimeout, FrameError)) and type(error) is type(lost)
                if same or (lost is not None and time.monotonic() > deadline):
                    raise
                if lost is None:
                    deadline = time.monotonic() + self.reconnect_seconds
                lost = error

    def _come_back(self, lost: SplitError | None, deadline: float) -> FrameConnection:
        assert self._edge is not None
        try:
            self._connect(self._edge, deadline, known=True)
        except LinkError as error:
            if lost is None:
                raise
            raise type(lost)(f"{lost}; then, for {self.reconnect_seconds:g} s: {error}") from error
        self.reconnects += 1
        assert self._wire is not None
        return self._wire

    def _connect(self, edge: EdgeEnd, deadline: float, known: bool = False) -> Fields:
        while True:
            duplex: Duplex | None = None
            try:
                duplex = dial(self.host, self.port, self.receive_seconds)
                return self._hello(edge, duplex, known)
            except (OSError, SplitError) as error:
                self.close()
                if duplex is None:
                    problem = LinkError(f"no connection with {self.host} port {self.port}: {error}")
                else:
                    duplex.close()
                    if isinstance(error, TrustError) or not isinstance(error, LinkError):
                        raise
                    problem = error
            if time.monotonic() > deadline:
                raise problem
            time.sleep(_BETWEEN_TRIES)

    def _hello(self, edge: EdgeEnd, duplex: Duplex, known: bool) -> Fields:
        wire = FrameConnection(
            duplex, self.credentials, host=self.host, ledger=self.ledger, limit=self.limit, seconds=HELLO_SECONDS
        )
        wire.send(Message("hello", fields=edge.hello()), self.receive_seconds)
        ready = wire.receive(self.receive_seconds, "the answer to hello")
        fields = ready.fields or {}
        if ready.kind == "error":
            sentence = printable(fields.get("sentence"))
            if fields.get("busy") is True:
                raise LinkError(sentence)
            raise SessionError(f"the cloud refused: {sentence}")
        if ready.kind != "ready" or not isinstance(fields.get("known"), bool):
            raise SessionError(f"the cloud answered hello with {ready.kind!r}: the ends run different versions")
        if known and not fields["known"]:
            raise SessionError("the cloud has restarted: restart this end too, both continue from checkpoints")
        self._wire = wire
        return fields

    def close(self) -> None:
        """Close the connection. The session stays open at the cloud unless the edge has said bye."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Newcomer:
    duplex: Duplex
    ledger: ByteLedger = field(default_factory=ByteLedger)  # its bytes until then
    wire: FrameConnection | None = None
    hello: Fields | None = None  # None once it is heard: there will be none, for the reason in ``error``
    error: Exception | None = None
    answered: threading.Event = field(default_factory=threading.Event)  # it has been accepted or refused


@dataclass
class CloudServer(contextlib.AbstractContextManager["CloudServer"]):
    """Listens for edges and answers one at a time, the next one after bye; one that reconnects gets its place back.

    Attributes:
        cloud: the state machine behind it.
        host, port: to listen at; 0: a free port is chosen, and ``port`` is set to it.
        credentials: for TLS; None: unencrypted, only on loopback or with ``insecure=True``.
        insecure: allow unencrypted connections from other machines.
        hold_seconds: how long an edge whose connection was lost keeps its place against other edges.
        message_seconds: how long an edge may be silent within a message, accept nothing of one, or keep its place
            against other edges while it says nothing.
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
                if self._answer(self._wire) and left is not None:
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
        self._door.forget(newcomer.duplex)  # from here on it is not closed to make room
        wire = newcomer.wire
        if wire is None or newcomer.hello is None:
            self._refuse(newcomer, newcomer.error)
            return
        name = wire.peer or str(newcomer.hello.get("edge"))
        holder = self.cloud.edge
        since, most = (self._heard_at, self.message_seconds) if self._wire else (self._lost_at, self.hold_seconds)
        try:
            if holder and name != holder and time.monotonic() - since < most:
                sentence = f"the cloud is busy with edge {printable(holder)!r}; this one has to wait"
                wire.send(Message("error", fields={"sentence": sentence, "busy": True}), HELLO_SECONDS)
                self._refuse(newcomer, None)
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
        self._drop()
        self._wire, self._heard_at = wire, time.monotonic()
        self._say(f"edge {self.cloud.edge!r} {'is back' if fields['known'] else 'begins'}, step {fields['resume']}")

    def _refuse(self, newcomer: _Newcomer, why: Exception | None) -> None:
        if why is not None:
            self._say(f"refused a connection from {newcomer.duplex.host}: {why}")
        newcomer.duplex.close()
        self.ledger.add(newcomer.ledger)

    def _answer(self, wire: FrameConnection) -> bool:
        """Handle a request from the current edge. Return whether it was bye."""
        try:
            request = wire.poll()
            if request is None:
                return False
            try:
                reply = self.cloud.handle(request)
            except SessionError as error:
                fields = {"sentence": printable(error)}
                wire.send(Message("error", request.step, request.sequence, fields=fields), self.message_seconds)
                self._say(f"refused edge {self.cloud.edge!r}: {error}")
                raise
            wire.send(reply, self.message_seconds)
        except (LinkError, FrameError, SessionError) as error:
            self._lose(str(error))
            return False
        if request.kind != "bye":
            return False
        self._say(f"bye after {request.step} steps")
        self._drop()
        return True

    def _lose(self, why: str) -> None:
        self._say(f"edge {self.cloud.edge!r} is gone: {why}")
        self._drop()
        self._lost_at = time.monotonic()

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _say(self, sentence: str) -> None:
        self.say(printable(sentence))  # it may contain text from a stranger

    def close(self) -> None:
        """Close all connections. From another thread, first wait until the request being served is answered."""
        self._door.close()
        self._ring.close()
        with self._serving:
            self._drop()
            while not self._heard.empty():
                self._heard.get().duplex.close()
            self._bell.close()

    def __exit__(self, *_: object) -> None:
        self.close()
