"""One connection: a socket, TLS over memory buffers, frames; every byte that crosses the socket is counted."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import time
from collections import deque

from thinwire.link.tls import Credentials
from thinwire.split.errors import LinkError, LinkTimeout, TrustError
from thinwire.split.frames import Message, MessageReader, encode
from thinwire.split.ledger import ByteLedger

_PIECE = 1 << 16
_BURST = 1 << 18  # whole TLS records of 16 KiB
_HELLO_BYTES = 1 << 16
HANDSHAKE_SECONDS = 10.0


class FrameConnection:
    """A connected pair's end. Blocking, with a deadline for everything.

    A server's takes 64 KiB at most, and has a deadline for the handshake and all that comes, until `admit`; a client's
    has one for the handshake.

    TLS runs as an ``SSLObject`` over memory buffers, so ciphertext is counted where it leaves.

    Attributes:
        peer: the common name in the other end's certificate; None without TLS.
    """

    def __init__(
        self,
        connected: socket.socket,
        credentials: Credentials | None,
        *,
        server: bool,
        host: str | None = None,
        ledger: ByteLedger,
        limit: int,
        seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._socket = connected
        self._ledger = ledger
        self._limit = limit
        self._reader = MessageReader(min(limit, _HELLO_BYTES) if server else limit, ledger)
        self._seconds = seconds
        self._deadline: float | None = time.monotonic() + seconds
        self._ready: deque[Message] = deque()
        self._tls: ssl.SSLObject | None = None
        self.peer: str | None = None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if credentials is not None:
            self._handshake(credentials, server, host)
        if not server:
            self._deadline = None

    def admit(self, ledger: ByteLedger) -> None:
        """Its hello is accepted: messages may be long from now on, and take their time; they count in this ledger."""
        self._deadline, self._reader.limit = None, self._limit
        self._ledger = self._reader.ledger = ledger

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def _handshake(self, credentials: Credentials, server: bool, host: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = credentials.contexts[server].wrap_bio(
            self._in, self._out, server_side=server, server_hostname=None if server else host
        )
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush(self._seconds)
                data = self._pull(self._seconds, "the TLS handshake")
                if not data:
                    raise LinkError("the other end closed during the TLS handshake: does it speak TLS?") from None
                self._ledger.received["tls"] += len(data)
                self._in.write(data)
            except ssl.SSLError as error:
                with contextlib.suppress(LinkError):  # tell the other end why, if it still listens
                    self._flush(1.0)
                raise TrustError(_words(error)) from error
        self._flush(self._seconds)
        found = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
        if credentials.fingerprint not in (None, found):
            raise TrustError(f"the other end shows the fingerprint {found}, which is not the pinned one")
        subject = (tls.getpeercert() or {}).get("subject", ())
        self.peer = next((value for part in subject for name, value in part if name == "commonName"), None)  # type: ignore
        self._tls = tls
        self._decrypt(b"", "hello")  # what came with the end of the handshake

    def send(self, message: Message, seconds: float) -> None:
        """Send a whole message.

        Args:
            message: to send.
            seconds: how long the other end may take nothing at all.

        Raises:
            LinkError: the connection is lost; `LinkTimeout`: it took no bytes for so long.
        """
        waiting = bytearray()  # frames share TLS records, whose overhead is 22 bytes each
        for piece in encode(message, self._ledger):
            waiting += piece
            while len(waiting) > _BURST:
                self._write(waiting[:_BURST], seconds)
                del waiting[:_BURST]
        self._write(waiting, seconds)

    def receive(self, seconds: float, waiting_for: str = "a message") -> Message:
        """The next message.

        Args:
            seconds: how long the other end may say nothing at all.
            waiting_for: what, for the error.

        Raises:
            LinkError: the connection is lost; `LinkTimeout`: the other end was silent for so long.
            FrameError: what came is no message.
        """
        while not self._ready:
            self._read(seconds, waiting_for)
        return self._ready.popleft()

    def poll(self) -> Message | None:
        """The next message if it is whole with what has come; for a socket that is readable.

        Raises:
            LinkError, FrameError: as `receive`.
        """
        if not self._ready:
            self._read(1.0, "a request")
        return self._ready.popleft() if self._ready else None

    @property
    def middle(self) -> bool:
        """Whether part of a message has come."""
        return self._reader.middle

    def close(self) -> None:
        """Close it; never raises."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, plain: bytes | bytearray, seconds: float) -> None:
        if self._tls is None:
            self._push(plain, seconds)
            return
        self._tls.write(plain)
        self._ledger.sent["tls"] -= len(plain)
        self._flush(seconds)

    def _read(self, seconds: float, waiting_for: str) -> None:
        """Take in what comes next."""
        data = self._pull(seconds, waiting_for)
        if not data:
            raise LinkError(f"the connection was closed while waiting for {waiting_for}")
        if self._tls is None:
            self._ready.extend(self._reader.feed(data))
        else:
            self._decrypt(data, waiting_for)

    def _decrypt(self, data: bytes, waiting_for: str) -> None:
        assert self._tls is not None
        self._ledger.received["tls"] += len(data)
        self._in.write(data)
        while True:
            try:
                plain = self._tls.read(_PIECE)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLError as error:
                raise TrustError(_words(error)) from error
            if not plain:
                raise LinkError(f"the connection was closed while waiting for {waiting_for}")
            self._ledger.received["tls"] -= len(plain)
            self._ready.extend(self._reader.feed(plain))

    def _push(self, data: bytes | bytearray, seconds: float) -> None:
        rest = memoryview(data)
        try:
            self._socket.settimeout(max(0.001, seconds))
            while rest:
                rest = rest[self._socket.send(rest) :]
        except TimeoutError as error:
            raise LinkTimeout(f"the connection took no bytes for {seconds:g} s") from error
        except OSError as error:
            raise LinkError(f"the connection was lost: {error}") from error

    def _pull(self, seconds: float, waiting_for: str) -> bytes:
        left = seconds if self._deadline is None else min(seconds, self._deadline - time.monotonic())
        try:
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            return self._socket.recv(_PIECE)
        except TimeoutError as error:
            if self._deadline is not None:
                raise LinkTimeout(f"{waiting_for} was not over within {self._seconds:g} s") from error
            raise LinkTimeout(f"nothing came for {seconds:g} s while waiting for {waiting_for}") from error
        except OSError as error:
            raise LinkError(f"the connection was lost while waiting for {waiting_for}: {error}") from error

    def _flush(self, seconds: float) -> None:
        data = self._out.read()
        if data:
            self._push(data, seconds)
            self._ledger.sent["tls"] += len(data)


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other end's certificate is not to be trusted: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        return f"the other end refused this end's certificate or TLS version ({reason})"
    return f"TLS failed ({reason}): does the other end speak TLS?"
