"""`CloudClient`: the edge's one outgoing connection; if it is lost, it reconnects and repeats the request."""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass, field
from types import TracebackType

from thinwire.systems.link.duplex import Duplex, dial
from thinwire.systems.link.hello import is_loopback
from thinwire.systems.link.listener import HELLO_SECONDS, check_port
from thinwire.systems.link.tls import Credentials
from thinwire.systems.split.edge import EdgeEnd, printable
from thinwire.systems.split.errors import FrameError, LinkError, LinkTimeout, SessionError, TrustError
from thinwire.systems.split.frames import Fields, Message
from thinwire.systems.split.ledger import ByteLedger
from thinwire.systems.split.wire import FrameConnection

DEFAULT_LIMIT = 1 << 28  # bytes of one message
_BETWEEN_TRIES = 0.2


@dataclass
class CloudClient:
    """A connection from an edge to its cloud, with alternating requests and replies.

    If it is lost, the edge reconnects, says hello with the same session, and repeats the request that has no reply yet;
    the cloud answers a repeated request from its saved reply. So a lost connection leaves no half-applied step.

    Attributes:
        host: of the cloud.
        port: of the cloud.
        credentials: for TLS; None: unencrypted, only on loopback or with ``insecure=True``.
        insecure: allow an unencrypted connection to another machine.
        receive_seconds: how long the cloud may be silent before the connection counts as lost; the second time in a row
            raises `LinkTimeout`.
        reconnect_seconds: how long to try again after the connection was lost.
        limit: most bytes of a received message.
        ledger: bytes of all connections.
        reconnects: how often it was lost and re-established.
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
        ready = self._connect(time.monotonic() + self.reconnect_seconds)
        edge.open(self.call, ready)

    def call(self, request: Message) -> Message:
        """Send a request and wait for its reply, over as many connections as it takes.

        Raises:
            LinkError: the connection was not re-established in time; `LinkTimeout`: the cloud was silent.
            SessionError, FrameError: the other end has changed, or sent something invalid.
        """
        lost: LinkError | None = None
        deadline = 0.0
        while True:
            if self._wire is None:
                self._come_back(lost, deadline)
            assert self._wire is not None
            try:
                self._wire.send(request, self.receive_seconds)
                return self._wire.receive(self.receive_seconds, f"the reply to {request.kind!r} of step {request.step}")
            except LinkError as error:
                self._drop()
                silent = isinstance(error, LinkTimeout) and isinstance(lost, LinkTimeout)
                if silent or (lost is not None and time.monotonic() > deadline):
                    raise
                if lost is None:
                    deadline = time.monotonic() + self.reconnect_seconds
                lost = error
            except FrameError:
                self._drop()
                raise

    def _come_back(self, lost: LinkError | None, deadline: float) -> None:
        """Reconnect after `lost`; if that fails, report both errors."""
        try:
            self._connect(deadline, known=True)
        except LinkError as error:
            if lost is None:
                raise
            raise type(lost)(f"{lost}; then, for {self.reconnect_seconds:g} s: {error}") from error
        self.reconnects += 1

    def _connect(self, deadline: float, known: bool = False) -> Fields:
        """Connect and say hello, repeatedly until the deadline; raise errors that trying again cannot fix."""
        assert self._edge is not None
        while True:
            try:
                duplex = dial(self.host, self.port, self.receive_seconds)
            except OSError as error:
                problem: LinkError = LinkError(f"no connection with {self.host} port {self.port}: {error}")
            else:
                try:
                    return self._hello(duplex, known)
                except (FrameError, SessionError, TrustError):
                    self._drop()
                    duplex.close()
                    raise
                except LinkError as error:
                    self._drop()
                    duplex.close()
                    problem = error
            if time.monotonic() > deadline:
                raise problem
            time.sleep(_BETWEEN_TRIES)

    def _hello(self, duplex: Duplex, known: bool) -> Fields:
        assert self._edge is not None
        self._wire = FrameConnection(
            duplex, self.credentials, host=self.host, ledger=self.ledger, limit=self.limit, seconds=HELLO_SECONDS
        )
        self._wire.send(Message("hello", fields=self._edge.hello()), self.receive_seconds)
        ready = self._wire.receive(self.receive_seconds, "the answer to hello")
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
        return fields

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def close(self) -> None:
        """Close the connection. The session stays open at the cloud unless the edge has said bye."""
        self._drop()

    def __enter__(self) -> CloudClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.close()


def check_plain(host: str, insecure: bool) -> None:
    """Raise ``ValueError`` for a connection to another machine without TLS, unless ``insecure``."""
    if not insecure and not is_loopback(host):
        raise ValueError(
            f"no keys for a connection with {host}: give --keys (thinwire keys new makes them), or --insecure to send "
            "everything in the clear"
        )
