"""The two ends over a link: `CloudClient` calls for the edge, `CloudServer` listens for edges.

If a connection is lost, the edge reconnects, says hello with the same session, and repeats the request that has no
reply yet; the cloud answers a repeated request from its saved reply. So a lost connection leaves no half-applied step.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thinwire.core.connect import HELLO_SECONDS
from thinwire.core.errors import NotAdmitted, PairError, PairTimeout
from thinwire.core.tls import Credentials
from thinwire.systems.link.actor import Actor
from thinwire.systems.link.hello import INSECURE, PeerIdentity, Trust, check_host
from thinwire.systems.link.listener import Listener, check_port, connect
from thinwire.systems.link.peer import Peer
from thinwire.systems.split.ends import CloudEnd, EdgeEnd, printable
from thinwire.systems.split.errors import LinkError, LinkTimeout, SessionError
from thinwire.systems.split.frames import CODEC, MOST_TEXT, ByteLedger, Fields, Message, Packed, pack, read_text, unpack

DEFAULT_LIMIT = 1 << 28  # bytes of one message
MOST = 64  # edges that wait for an answer to their hello
_BETWEEN_TRIES = 0.2


def trust_of(host: str, credentials: Credentials | None, insecure: bool) -> Trust:
    """Return how two ends trust each other. ``ValueError``: in the clear to another machine, unless ``insecure``."""
    trust = credentials or (INSECURE if insecure else None)
    check_host(host, trust, "give --keys (thinwire keys new makes them), or --insecure to send everything in the clear")
    return trust


class CountedPeer:
    """Messages over a peer, and their bytes in a ledger."""

    def __init__(self, peer: Peer, ledger: ByteLedger) -> None:
        self.peer, self._ledger, self._extra = peer, ledger, (0, 0)

    def send(self, message: Message, seconds: float) -> None:
        self.peer.send(pack(message), CODEC, seconds, seconds)
        self._ledger.count(message, self._ledger.sent)

    def receive(self, seconds: float, limit: int) -> Message:
        message = unpack(self.peer.receive(CODEC, seconds, limit))
        self._ledger.count(message, self._ledger.received)
        self.count_rest()
        return message

    def post(self, message: Message) -> None:
        self._ledger.count(message, self._ledger.sent)
        self.peer.post(pack(message))

    def count_rest(self) -> None:
        """Count what has crossed beside messages."""
        (sent, received), before = self.peer.crossed, self._extra
        self._extra = sent - self.peer.sent_bytes, received - self.peer.received_bytes
        self._ledger.sent["link"] += self._extra[0] - before[0]
        self._ledger.received["link"] += self._extra[1] - before[1]


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
    _wire: CountedPeer | None = None
    _edge: EdgeEnd | None = None

    def __post_init__(self) -> None:
        check_port(self.port, 1)
        # as a number belongs to the first name that uses it, each certificate has its own
        number = int(self.credentials.own_fingerprint[:15], 16) if self.credentials is not None else 0
        self._identity = PeerIdentity("edge", number, trust_of(self.host, self.credentials, self.insecure))

    def attach(self, edge: EdgeEnd) -> None:
        """Connect an edge and agree on the step to continue from.

        Raises:
            LinkError: no connection within ``reconnect_seconds``, or an end cannot be trusted.
            SessionError: the ends do not match.

        Warns:
            UserWarning: the plan has the front in the cloud, so the edge's inputs will leave it.
        """
        plan = edge.half.plan
        if plan.front_on == "cloud":
            warnings.warn(str(plan.leaves), stacklevel=2)
        self._edge = edge
        edge.open(self.call, self._connect(time.monotonic() + self.reconnect_seconds))

    def call(self, request: Message) -> Message:
        """Send a request and wait for its reply, over as many connections as it takes.

        Raises:
            LinkError: the connection was not re-established in time; `LinkTimeout`: the cloud was silent.
            SessionError: the other end has changed.
        """
        lost: LinkError | None = None
        deadline, awaited = math.inf, f"the reply to {request.kind!r} of step {request.step}"
        while True:
            if self._wire is None:
                self._come_back(lost, deadline)
            assert self._wire is not None
            try:
                self._wire.send(request, self.receive_seconds)
                return self._wire.receive(self.receive_seconds, self.limit)
            except (PairError, ValueError) as error:  # a message that is not valid may have been damaged on the way
                self.close()
                kind = LinkTimeout if isinstance(error, PairTimeout) else LinkError
                found = kind(f"the connection was lost while waiting for {awaited}: {error}")
                invalid = isinstance(error, (PairTimeout, ValueError)) and type(found) is type(lost)
                if lost is not None and (invalid or time.monotonic() > deadline):
                    raise found from error
                deadline, lost = min(deadline, time.monotonic() + self.reconnect_seconds), found

    def _come_back(self, lost: LinkError | None, deadline: float) -> None:
        try:
            self._connect(deadline, known=True)
        except LinkError as error:
            if lost is None:
                raise
            raise type(lost)(f"{lost}; then, for {self.reconnect_seconds:g} s: {error}") from error
        self.reconnects += 1

    def _connect(self, deadline: float, known: bool = False) -> Fields:
        while True:
            try:
                return self._hello(known)
            except PairError as error:
                self.close()
                if isinstance(error, NotAdmitted) or time.monotonic() > deadline:
                    raise LinkError(f"no connection with {self.host} port {self.port}: {error}") from error
            time.sleep(_BETWEEN_TRIES)

    def _hello(self, known: bool) -> Fields:
        assert self._edge is not None
        hello, seconds = json.dumps(self._edge.hello()).encode(), min(HELLO_SECONDS, self.receive_seconds)
        self._wire = CountedPeer(connect(self.host, self.port, hello, self._identity, seconds), self.ledger)
        self.ledger.messages["hello"] += 1
        ready = self._wire.receive(self.receive_seconds, MOST_TEXT)
        fields = ready.fields or {}
        if ready.kind == "error":
            sentence = printable(fields.get("sentence"))
            raise PairError(sentence) if fields.get("busy") is True else SessionError(f"the cloud refused: {sentence}")
        if ready.kind != "ready" or not isinstance(fields.get("known"), bool):
            raise SessionError(f"the cloud answered hello with {ready.kind!r}: the ends run different versions")
        if known and not fields["known"]:
            raise SessionError("the cloud has restarted: restart this end too, both continue from checkpoints")
        return fields

    def close(self) -> None:
        """Close the connection. The session stays open at the cloud unless the edge has said bye."""
        if self._wire is not None:
            self._wire.peer.close()
            self._wire = None

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class CloudServer(Actor):
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
        ledger: bytes of all edges' connections.
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
    _wire: CountedPeer | None = None
    _lost_at: float = 0.0
    _heard_at: float = 0.0
    _byes: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        trust = trust_of(self.host, self.credentials, self.insecure)
        self._closed, self._serving, self._wires = False, threading.RLock(), list[CountedPeer]()
        try:
            self._listener = Listener(self.port, self.host, roles=("edge",), trust=trust, seconds=self.hello_seconds)
        except (PairError, ValueError) as error:
            raise ValueError(f"cannot listen at {self.host}: {error}") from error
        self.port = self._listener.port
        self._listener.serve(self._came, MOST_TEXT)

    def serve(self, edges: int | None = 1) -> None:
        """Answer until that many edges (None: forever) have said bye, or ``close`` is called from another thread."""
        self._say(f"listening at {self.host} port {self.port}{'' if self.credentials else ', in the clear'}")
        with self._serving:
            ends = math.inf if edges is None else self._byes + edges
            self.run_until(lambda: self._closed or self._byes >= ends, 1.0)

    def handle(self, what: str, who: Any, value: Any) -> None:
        if what == "hello":
            self._admit(who, value)
        elif self._wire is None or self._wire.peer is not who:
            return  # it belongs to an earlier connection
        elif what == "lost":
            self._lose(value)
        elif what == "coming":  # a long message, which may take so many seconds
            self._heard_at = time.monotonic() + value
        else:
            self._answer(self._wire, value)
            self._heard_at = time.monotonic()

    def _came(self, peer: Peer, hello: bytes) -> None:
        """Take whoever has connected; called in a thread of its own."""
        if self._events.qsize() > MOST:
            raise ValueError("too many wait for an answer")
        self.tell("hello", peer, read_text(hello))

    def _admit(self, peer: Peer, hello: Fields) -> None:
        name, holder = peer.other.shown.name if peer.other.shown else None, self.cloud.edge
        since, most = (self._heard_at, self.message_seconds) if self._wire else (self._lost_at, self.hold_seconds)
        if holder and (name or str(hello.get("edge"))) != holder and time.monotonic() - since < most:
            self._refuse(peer, f"the cloud is busy with edge {printable(holder)!r}; this one has to wait", busy=True)
            return
        try:
            fields = self.cloud.hello(hello, name)
        except SessionError as error:
            self._say(f"refused a connection from {peer.host}: {error}")
            self._refuse(peer, printable(error))
            return
        self._drop()
        self._wire, self._heard_at = CountedPeer(self._start(peer), self.ledger), time.monotonic()
        self._wires.append(self._wire)
        self._wire.post(Message("ready", fields=fields))
        self._say(f"edge {self.cloud.edge!r} {'is back' if fields['known'] else 'begins'}, step {fields['resume']}")

    def _refuse(self, peer: Peer, sentence: str, busy: bool = False) -> None:
        self._start(peer).post(pack(Message("error", fields={"sentence": sentence, "busy": busy})))
        self.retire(peer, finish=True)

    def _start(self, peer: Peer) -> Peer:
        def deliver(packed: Packed) -> None:
            self.tell("request", peer, unpack(packed))

        peer.start(
            CODEC,
            seconds=self.message_seconds,
            most_bytes=self.limit,
            deliver=deliver,
            closed=partial(self.tell, "lost", peer),
            announced=partial(self.tell, "coming", peer),
            silent=True,
        )
        return peer

    def _answer(self, wire: CountedPeer, request: Message) -> None:
        """Handle a request from the current edge."""
        self.ledger.count(request, self.ledger.received)
        if wire.peer.outbox:
            self._lose("it asks again without taking the reply")
            return
        try:
            wire.post(self.cloud.handle(request))
        except SessionError as error:
            wire.post(Message("error", request.step, request.sequence, fields={"sentence": printable(error)}))
            self._say(f"refused edge {self.cloud.edge!r}: {error}")
            self._lose(str(error), finish=True)
            return
        if request.kind == "bye":
            self._say(f"bye after {request.step} steps")
            self._drop(finish=True)
            self._byes += 1

    def _lose(self, why: str, finish: bool = False) -> None:
        self._say(f"edge {self.cloud.edge!r} is gone: {why}")
        self._drop(finish)
        self._lost_at = time.monotonic()

    def _drop(self, finish: bool = False) -> None:
        if self._wire is not None:
            self.retire(self._wire.peer, finish=finish)
            self._wire = None

    def _say(self, sentence: str) -> None:
        self.say(printable(sentence))  # it may contain text from a stranger

    def close(self) -> None:
        """Close all connections. From another thread, first wait until the request being served is answered."""
        self._listener.close()
        self._closed = True
        self.tell("closed")
        with self._serving:
            self._drop()
            while (event := self.next_event(0.0)) is not None:
                if event[0] == "hello":
                    event[1].close()
            self.join(5.0)
            for wire in self._wires:
                wire.count_rest()
            self._wires.clear()
