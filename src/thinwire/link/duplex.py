"""A connected socket whose two directions are used by two threads, each with time limits of its own."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from thinwire.link.errors import PairError

_LOOK_SECONDS = 5.0
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # no descriptor of its own, as epoll has


class Duplex:
    """Bytes in and out. Time limits are points on the clock of ``time.monotonic``; ``math.inf``: there is none.

    Args:
        connection: owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lock = threading.Lock()
        self._users, self._closed = 0, False
        self._in, self._out = _Selector(), _Selector()
        self._in.register(connection, selectors.EVENT_READ)
        self._out.register(connection, selectors.EVENT_WRITE)
        with contextlib.suppress(OSError):
            self.host = str(connection.getpeername()[0])

    host = "somebody who has gone"
    """The other side's address."""

    def read(self, size: int, end: float) -> bytes:
        """Exactly that many bytes.

        Raises:
            PairError: they did not come in time, or the other side has gone.
        """
        data = bytearray(size)
        self.read_into(memoryview(data), end)
        return bytes(data)

    def read_into(self, view: memoryview, end: float) -> None:
        """Fill a memory; see :meth:`read`."""
        with self._in_use():
            while view:
                try:
                    count = self._socket.recv_into(view)
                except BlockingIOError:
                    self._wait(self._in, end)
                    continue
                except OSError as error:
                    raise PairError(f"nothing came ({error})") from error
                if not count:
                    raise PairError("the other side has closed the connection")
                view = view[count:]

    def write(self, data: bytes | memoryview, end: float) -> None:
        """Send all of it.

        Raises:
            PairError: it was not taken in time, or the other side has gone.
        """
        view = memoryview(data)
        with self._in_use():
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    self._wait(self._out, end)
                except OSError as error:
                    raise PairError(f"the other side has gone ({error})") from error

    @staticmethod
    def _wait(selector: selectors.BaseSelector, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise PairError("timed out: the other side is silent, or takes nothing")
        selector.select(min(left, _LOOK_SECONDS))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The descriptor is not given back while somebody waits for it: it would soon be another connection's."""
        with self._lock:
            if self._closed:
                raise PairError("this connection is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._socket.close()

    def close(self) -> None:
        """Give it back; whoever still reads or writes gets an error."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._closed = True
            if not self._users:
                self._socket.close()


def end_of(seconds: float | None) -> float:
    """The point on the clock in so many seconds; None: never."""
    return math.inf if seconds is None else time.monotonic() + seconds
