"""Connections that have not said hello yet: a thread each, bounded in number, bytes and time."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from dataclasses import dataclass, field

from thinwire.link.tls import Credentials
from thinwire.split.errors import LinkError, SessionError
from thinwire.split.frames import Fields
from thinwire.split.ledger import ByteLedger
from thinwire.split.wire import FrameConnection

MOST = 64


@dataclass
class Newcomer:
    """A connection until its hello has been answered.

    Attributes:
        connected: its socket.
        address: where it comes from.
        ledger: its bytes until then.
        wire: once it was made.
        hello: once it was heard; None: there will be none, for the reason in ``error``.
    """

    connected: socket.socket
    address: str
    ledger: ByteLedger = field(default_factory=ByteLedger)
    wire: FrameConnection | None = None
    hello: Fields | None = None
    error: Exception | None = None

    def close(self) -> None:
        """Close its socket, whoever waits for it."""
        with contextlib.suppress(OSError):
            self.connected.shutdown(socket.SHUT_RDWR)
        self.connected.close()


class Door:
    """Hears newcomers side by side, so that one who says nothing delays nobody. For ``select``: readable when `next`
    has one.

    Args:
        credentials: for TLS.
        limit: bytes of one message, once the newcomer is let in.
        seconds: for handshake and hello together.
    """

    def __init__(self, credentials: Credentials | None, limit: int, seconds: float) -> None:
        self._credentials, self._limit, self._seconds = credentials, limit, seconds
        self._waiting: dict[int, tuple[Newcomer, threading.Thread]] = {}  # the longest there first
        self._ended: queue.SimpleQueue[Newcomer] = queue.SimpleQueue()
        self._near, self._far = socket.socketpair()

    def fileno(self) -> int:
        """For ``select``."""
        return self._near.fileno()

    def let_in(self, connected: socket.socket, address: str) -> None:
        """Hear a new connection; if too many are being heard, the one that has had the longest time makes room."""
        if len(self._waiting) >= MOST:
            oldest, thread = next(iter(self._waiting.values()))
            with contextlib.suppress(OSError):
                oldest.connected.shutdown(socket.SHUT_RDWR)
            thread.join()
            del self._waiting[id(oldest)]
            oldest.hello, oldest.error = None, LinkError(f"{MOST} others came before it had said hello")
        newcomer = Newcomer(connected, address)
        thread = threading.Thread(target=self._hear, args=(newcomer,), name="thinwire_hello", daemon=True)
        self._waiting[id(newcomer)] = newcomer, thread
        thread.start()

    def next(self) -> Newcomer:
        """One whose hello was heard, or who will say none; waits for it."""
        self._near.recv(1)
        newcomer = self._ended.get()
        self._waiting.pop(id(newcomer), None)
        return newcomer

    def _hear(self, newcomer: Newcomer) -> None:
        try:
            newcomer.wire = FrameConnection(
                newcomer.connected, self._credentials, server=True, ledger=newcomer.ledger, limit=self._limit,
                seconds=self._seconds,
            )  # fmt: skip
            hello = newcomer.wire.receive(self._seconds, "hello")
            if hello.kind != "hello" or hello.fields is None:
                raise SessionError(f"a connection began with {hello.kind!r} instead of hello")
            newcomer.hello = hello.fields
        except Exception as error:  # whatever a stranger sends, it must not end the cloud
            newcomer.error = error
        self._ended.put(newcomer)
        self._far.send(b".")

    def close(self) -> None:
        """Send all away who have not been heard."""
        for newcomer, thread in self._waiting.values():
            with contextlib.suppress(OSError):
                newcomer.connected.shutdown(socket.SHUT_RDWR)
            thread.join()
            newcomer.close()
        self._waiting.clear()
        while not self._ended.empty():
            self._ended.get().close()
        self._near.close()
        self._far.close()
