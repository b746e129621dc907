"""A connected socket, with TLS if requested; two threads use its two directions, each with its own time limits."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from thinwire.core.collectives.tcp_info import ask_for_control, is_long, wanted_sockets
from thinwire.core.errors import NotAdmitted, PairError, PairTimeout
from thinwire.core.sockets import Selector, not_for_children
from thinwire.core.tls import Certificate, Cipher, CipherSocket, Credentials

_LOOK_SECONDS = 5.0
_ROOM = 1 << 16
_RECORD = 1 << 14
_BURST = 1 << 18  # whole records, encrypted together
SILENT = "timed out: the other side is silent, or does not read"
_Done = TypeVar("_Done", bytes, int)


class Duplex:
    """Bytes in and out. Deadlines are points on the clock of ``time.monotonic``; ``math.inf`` means no deadline.

    ``shown``: the other side's certificate; None without TLS. ``sent``, ``received``: bytes that crossed the socket.
    """

    shown: Certificate | None = None
    host = "somebody who has gone"
    """The other side's address."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # where nobody may count the other side's silence, the system asks at last whether its machine is still there
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if is_long([connection]):
            ask_for_control([connection])
        self._socket = not_for_children(connection)
        self._cipher: Cipher | None = None
        self._room = memoryview(b"")
        self._lock = threading.Lock()
        self._users, self._closed = 0, ""
        self._in, self._out = Selector(), Selector()
        self._in.register(connection, selectors.EVENT_READ)
        self._out.register(connection, selectors.EVENT_WRITE)
        self.sent = self.received = 0
        with contextlib.suppress(OSError):
            self.host = str(connection.getpeername()[0])

    def secure(self, credentials: Credentials, end: float, host: str | None = None) -> None:
        """Use TLS from now on. ``host``: that was called; None: this side listens."""
        cipher, nothing = Cipher(credentials, host), memoryview(b"")
        self._room = memoryview(bytearray(_ROOM))
        with self._in_use():
            try:
                while not cipher.handshake_step():
                    self._send(memoryview(cipher.encrypt(nothing)), end)
                    self._feed(cipher, end)
            except NotAdmitted:
                with contextlib.suppress(PairError):  # tell the other side why, if it still listens
                    self._send(memoryview(cipher.encrypt(nothing)), min(end, end_of(1.0)))
                raise
            self._send(memoryview(cipher.encrypt(nothing)), end)
        self._cipher, self.shown = cipher, cipher.shown()

    def peek(self, end: float) -> bytes:
        with self._in_use():
            return self._when_ready(self._in, end, partial(self._socket.recv, 1, socket.MSG_PEEK))

    def read(self, size: int, end: float) -> bytes:
        """Read exactly ``size`` bytes. ``PairError``: they did not come in time, or the other side has gone."""
        data = bytearray(size)
        self.read_into(memoryview(data), end)
        return bytes(data)

    def read_into(self, view: memoryview, end: float) -> None:
        with self._in_use():
            cipher = self._cipher
            while view:
                if cipher is None:
                    count = self._receive(view, end)
                elif not (count := cipher.decrypt_into(view)):
                    self._feed(cipher, end)
                view = view[count:]

    def read_some(self, end: float) -> bytes:
        """Return the next received bytes; empty if only a part of a TLS record has come."""
        room = memoryview(bytearray(_ROOM + _RECORD))
        with self._in_use():
            cipher = self._cipher
            if cipher is None:
                return bytes(room[: self._receive(room, end)])
            count = cipher.decrypt_into(room)  # what came together with the end of the handshake
            if not count:
                self._feed(cipher, end)
                count = cipher.decrypt_into(room)
            return bytes(room[:count])

    def write(self, data: bytes | bytearray | memoryview, end: float) -> None:
        """Send all of it. ``PairError``: the other side did not accept it in time, or has gone."""
        view = memoryview(data)
        with self._in_use():
            if self._cipher is None:
                self._send(view, end)
                return
            while view:
                self._send(memoryview(self._cipher.encrypt(view[:_BURST])), end)
                view = view[_BURST:]

    @property
    def closed(self) -> bool:
        return bool(self._closed)

    def fileno(self) -> int:
        return self._socket.fileno()

    def _feed(self, cipher: Cipher, end: float) -> None:
        """Receive for the cipher. Empty records could come forever, so the deadline is checked each time."""
        if time.monotonic() > end:
            raise PairTimeout(SILENT)
        cipher.feed(self._room[: self._receive(self._room, end)])

    def _receive(self, view: memoryview, end: float) -> int:
        count = self._when_ready(self._in, end, partial(self._socket.recv_into, view))
        self.received += count
        return count

    def _send(self, view: memoryview, end: float) -> None:
        done = 0
        while done < len(view):
            count = self._when_ready(self._out, end, partial(self._socket.send, view[done:]))
            self.sent += count
            done += count

    def _when_ready(self, selector: selectors.BaseSelector, end: float, go: Callable[[], _Done]) -> _Done:
        while True:
            try:
                done = go()
            except BlockingIOError:
                self._wait(selector, end)
            except OSError as error:
                raise PairError(self._closed or f"the other side has gone ({error})") from error
            else:
                if not done:
                    raise PairError(self._closed or "the other side has closed the connection")
                return done

    @staticmethod
    def _wait(selector: selectors.BaseSelector, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise PairTimeout(SILENT)
        selector.select(min(left, _LOOK_SECONDS))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the descriptor open while it is in use: once closed, it could soon belong to another connection."""
        with self._lock:
            if self._closed:
                raise PairError(self._closed)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._socket.close()

    def release(self) -> socket.socket:
        """Give the socket away, which encrypts if this did, and close what is left. No thread may use this now."""
        with self._lock:
            if self._closed:
                raise PairError(self._closed)
            self._closed = "its socket was given away"
        plain = socket.socket(fileno=self._socket.detach())
        return plain if self._cipher is None else CipherSocket(plain, self._cipher)

    @property
    def sockets_wanted(self) -> int:
        """How many sockets its wire wants in all."""
        return wanted_sockets([self._socket])

    def close(self, why: str = "this connection is closed") -> None:
        """Close the connection; a thread that still reads or writes gets an error with the reason ``why``."""
        with self._lock:
            first, self._closed = not self._closed, self._closed or why
            if first:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()


def dial(host: str, port: int, seconds: float, source: tuple[str, int] | None = None) -> Duplex:
    """Connect. Where nobody listens, the kernel may choose that port for the caller, and TCP connect it to itself."""
    connection = socket.create_connection((host, port), seconds, source)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("Connection refused")
    return Duplex(connection)


def end_of(seconds: float | None) -> float:
    """Return the point on the clock ``seconds`` from now; None: never."""
    return math.inf if seconds is None else time.monotonic() + seconds
