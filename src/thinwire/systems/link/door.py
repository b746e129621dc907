"""A listening port, and the connections that have not identified themselves yet, limited in number and in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from thinwire.core.sockets import not_for_children
from thinwire.systems.link.duplex import Duplex
from thinwire.systems.link.errors import PairError

HELLO_SECONDS = 10.0
MOST_UNKNOWN = 128


class Door:
    """Handles new connections concurrently, one thread each, so that a silent one delays nobody.

    Args:
        port: 0 chooses a free one.
        host: the address to listen at.
        hear: called in a new thread for each new connection, with the connection and its deadline; must not raise.
        seconds: for a whole hello.
        most: if more hellos than this are unfinished, the oldest connection is closed.

    Raises:
        PairError: the port is taken.
        ValueError: the port is not a valid number.
    """

    def __init__(
        self,
        port: int,
        host: str,
        hear: Callable[[Duplex, float], None],
        seconds: float = HELLO_SECONDS,
        most: int = MOST_UNKNOWN,
    ) -> None:
        check_port(port)
        self._hear, self._seconds, self._most = hear, seconds, most
        self._unknown: dict[Duplex, None] = {}  # the oldest first
        self._lock = threading.Lock()
        try:
            server = socket.create_server((host, port), backlog=MOST_UNKNOWN)
        except OSError as error:
            advice = "choose another or end the program using it" if port else "is that an address of this machine?"
            raise PairError(f"port {port} of {host} cannot be used ({error.strerror}): {advice}") from error
        self._server: socket.socket | None = not_for_children(server)
        self.port = int(server.getsockname()[1])

    def open(self) -> None:
        """Begin to accept connections."""
        threading.Thread(target=self._accept, args=(self._server,), name="thinwire-accept", daemon=True).start()

    def forget(self, duplex: Duplex) -> None:
        """Note that a connection has identified itself."""
        with self._lock:
            self._unknown.pop(duplex, None)

    @property
    def closed(self) -> bool:
        """Whether the port is closed."""
        return self._server is None

    def close(self) -> None:
        """Give the port back, and close all unidentified connections."""
        with self._lock:
            server, self._server = self._server, None
            unknown = list(self._unknown)
        if server is None:
            return
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        for duplex in unknown:
            duplex.close()

    def _accept(self, server: socket.socket) -> None:
        while not self.closed:
            try:
                connection, _ = server.accept()
                duplex = Duplex(connection)
            except OSError:  # closed, or the process has no descriptors left
                time.sleep(0.01)
                continue
            with self._lock:
                if self.closed:
                    duplex.close()
                    return
                if len(self._unknown) >= self._most:
                    oldest = next(iter(self._unknown))
                    del self._unknown[oldest]
                    # while the lock is held: a connection that has been forgotten must not be closed for this reason
                    oldest.close(f"{self._most} others connected before it had said hello")
                self._unknown[duplex] = None
            try:
                threading.Thread(target=self._meet, args=(duplex,), name="thinwire-hello", daemon=True).start()
            except RuntimeError as error:  # perhaps no threads left; the caller will try again
                self.forget(duplex)
                duplex.close(str(error))

    def _meet(self, duplex: Duplex) -> None:
        try:
            self._hear(duplex, time.monotonic() + self._seconds)
        finally:
            self.forget(duplex)


def check_port(port: int, least: int = 0) -> None:
    """Raise ``ValueError`` if ``port`` is not a valid port number."""
    if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
        raise ValueError(f"port={port!r} must be a whole number from {least} to 65535")
