"""One connection: messages as frames over a link's socket; every byte through the socket is counted."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator

from thinwire.systems.link.duplex import Duplex, end_of
from thinwire.systems.link.errors import NotAdmitted, PairError, PairTimeout
from thinwire.systems.link.tls import Credentials
from thinwire.systems.split.errors import LinkError, LinkTimeout, TrustError
from thinwire.systems.split.frames import Message, MessageReader, encode
from thinwire.systems.split.ledger import ByteLedger

_BURST = 1 << 18  # whole TLS records of 16 KiB
_HELLO_BYTES = 1 << 16


class FrameConnection:
    """One end of a connection, blocking, with a deadline for every operation.

    Args:
        duplex: belongs to this object from now on.
        credentials: for TLS; None: unencrypted.
        host: of the cloud that was called; None: this end is the cloud. It accepts at most 64 KiB until `admit`.
        ledger: counts the bytes.
        limit: most bytes of a received message.
        seconds: for the TLS handshake, and at the cloud for everything until `admit`.
    """

    def __init__(
        self,
        duplex: Duplex,
        credentials: Credentials | None,
        *,
        host: str | None = None,
        ledger: ByteLedger,
        limit: int,
        seconds: float,
    ) -> None:
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
        """The common name in the other end's certificate; None without TLS."""
        return self._duplex.shown.name if self._duplex.shown else None

    def admit(self, ledger: ByteLedger) -> None:
        """Accept the hello: from now on messages may be long and have no common deadline; count them in ``ledger``."""
        self._end, self._reader.limit = math.inf, self._limit
        self._ledger = self._reader.ledger = ledger

    def fileno(self) -> int:
        """Return the descriptor, for :func:`readable`."""
        return self._duplex.fileno()

    def send(self, message: Message, seconds: float) -> None:
        """Send a whole message.

        Args:
            message: to send.
            seconds: how long the other end may take for each 256 KiB.

        Raises:
            LinkError: the connection is lost; `LinkTimeout`: the other end did not accept them in that time.
        """
        waiting = bytearray()  # frames share TLS records, whose overhead is 22 bytes each
        for piece in encode(message, self._ledger):
            waiting += piece
            while len(waiting) > _BURST:
                self._write(waiting[:_BURST], seconds)
                del waiting[:_BURST]
        self._write(waiting, seconds)

    def receive(self, seconds: float, waiting_for: str = "a message") -> Message:
        """Return the next message.

        Args:
            seconds: how long the other end may be silent.
            waiting_for: what is expected, for the error message.

        Raises:
            LinkError: the connection is lost; `LinkTimeout`: the other end was silent for too long.
            FrameError: the bytes are not a message.
        """
        while not self._ready:
            self._read(seconds, waiting_for)
        return self._ready.popleft()

    def poll(self) -> Message | None:
        """Read from a readable socket; return the next message if it is complete.

        Raises:
            LinkError, FrameError: as for `receive`.
        """
        if not self._ready:
            self._read(1.0, "a request")
        return self._ready.popleft() if self._ready else None

    @property
    def middle(self) -> bool:
        """Whether a part of a message has come."""
        return self._reader.middle

    def close(self) -> None:
        """Close it; never raises."""
        self._duplex.close()

    def _write(self, plain: bytearray, seconds: float) -> None:
        with self._lost("the other end to accept bytes", seconds):
            self._duplex.write(plain, end_of(seconds))
        self._count_tls(len(plain), 0)

    def _read(self, seconds: float, waiting_for: str) -> None:
        """Read the next bytes."""
        with self._lost(waiting_for, seconds):
            plain = self._duplex.read_some(min(end_of(seconds), self._end))
        self._count_tls(0, len(plain))
        self._ready.extend(self._reader.feed(plain))

    def _count_tls(self, sent: int, received: int) -> None:
        """Count the bytes that crossed the socket beyond that many of ours."""
        self._ledger.sent["tls"] += self._duplex.sent - self._sent - sent
        self._ledger.received["tls"] += self._duplex.received - self._received - received
        self._sent, self._received = self._duplex.sent, self._duplex.received

    @contextlib.contextmanager
    def _lost(self, waiting_for: str, seconds: float) -> Iterator[None]:
        """Turn errors of the link into errors of this package."""
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
