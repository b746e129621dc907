"""One TCP connection between two ranks: messages one after another, each way, without a word about them.

Nothing travels but the tensors' bytes. Both sides post the same messages in the same order, so the n-th that one sends
is the n-th that the other receives. What arrives before its receive is posted waits in the kernel: the wire goes on
also while this process is not scheduled, which Gloo's handshake for every message does not let it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.collectives.countdown_work import CountdownWork
from thinwire.link.memory import memory_of

if TYPE_CHECKING:
    from thinwire.collectives.socket_loop import SocketLoop

_CLOSED = "the other side has closed it"
_WAKE_BYTES = 1 << 20  # a receiver is woken for that many bytes, or for the rest of a message; half as many cost 3 %


@dataclass(eq=False)
class _Way:
    """One direction: what is left of messages, in their order; and when a byte last moved, or could have begun to."""

    waiting: deque[tuple[memoryview, CountdownWork]] = field(default_factory=deque)
    moved: float = 0.0


class Stream:
    """One end of a connection, shared by who posts messages and the loop that moves them.

    Args:
        connection: a connected TCP socket, owned from now on.
        peer: how to call the other side in errors.
        timeout: seconds without a byte after which a waiting message fails, and all after it.
        loop: who watches over the socket.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: float, loop: SocketLoop) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._peer, self._timeout, self._socket_loop = connection, peer, timeout, loop
        self._out, self._in = _Way(), _Way()
        self._lock = threading.RLock()
        self._error: RuntimeError | None = None
        self._woken_at, self._listening, self._asked = 1, False, 0
        self.number = connection.fileno()
        loop.add(self)

    def send(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post a contiguous CPU tensor or :func:`memory_of` one; what the kernel takes at once is now on its way."""
        if self._post(self._out, x, work):
            self.on_room()

    def receive(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post the place for the next message: a contiguous CPU tensor of its size, or :func:`memory_of` one."""
        if self._post(self._in, x, work):
            with self._lock:
                self._ask()

    def _post(self, way: _Way, x: Tensor | memoryview, work: CountdownWork) -> bool:
        """Whether the message is the only one that waits, so that somebody must see to it."""
        memory = x if isinstance(x, memoryview) else memory_of(x)
        if not memory:
            work.part_ended()
            return False
        with self._lock:
            if (error := self._error) is None:
                if not way.waiting:
                    way.moved = time.monotonic()
                way.waiting.append((memory, work))
                return len(way.waiting) == 1
        work.fail(error)
        return False

    def on_room(self) -> None:
        """Send what the kernel takes."""
        self._move(self._out, self.socket.send)

    def on_data(self) -> None:
        """Take in the next message, or what of it has arrived; the loop calls again if there is more."""
        self._listening = bool(self._in.waiting)
        self._move(self._in, self.socket.recv_into, most=1)

    def _move(self, way: _Way, transfer: Callable[[memoryview], int], most: int | None = None) -> None:
        ended: list[CountdownWork] = []
        with self._lock:
            try:
                while way.waiting and len(ended) != most:
                    left, work = way.waiting[0]
                    count = transfer(left)
                    if not count:
                        raise ConnectionResetError(_CLOSED)
                    way.moved = time.monotonic()
                    if count < len(
                        left
                    ):  # the kernel is full, or empty but for a small remainder: the loop calls again
                        way.waiting[0] = left[count:], work
                        break
                    way.waiting.popleft()
                    ended.append(work)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost(error)
            self._ask()
        for work in ended:
            work.part_ended()

    def check(self, now: float) -> None:
        """Fail if a message has waited too long without a byte."""
        if self._in.waiting and now - self._in.moved > self._timeout / 2:
            self.on_data()  # fewer bytes than the kernel wakes for
        with self._lock:
            still = [now - way.moved for way in (self._in, self._out) if way.waiting]
            if still and max(still) > self._timeout:
                self._fail(RuntimeError(f"timed out: {self._peer} moved no byte for {self._timeout:.0f} seconds"))

    def hung_up(self) -> None:
        """The other side is gone. What has arrived before counts."""
        self._move(self._in, self.socket.recv_into)
        self._lost(ConnectionResetError(_CLOSED))

    def fail(self, error: Exception) -> None:
        """Something went wrong while its bytes were moved."""
        self._fail(RuntimeError(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Give the connection back; whoever still waits gets an error."""
        self._fail(RuntimeError(f"the connection to {self._peer} is closed"))

    def _lost(self, error: OSError) -> None:
        self._fail(RuntimeError(f"the connection to {self._peer} was lost: {error.strerror or error}"))

    def _fail(self, error: RuntimeError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._socket_loop.remove(self)
            with contextlib.suppress(OSError):
                self.socket.close()
            waiting = [work for way in (self._in, self._out) for _, work in way.waiting]
            self._in.waiting.clear()
            self._out.waiting.clear()
        for work in waiting:
            work.fail(error)

    def _ask(self) -> None:
        """Tell the loop and the kernel what this waits for; the lock is held.

        It listens on after the last message: the next is likely to be posted before anything comes for it.
        """
        if self._error is not None:
            return
        if self._in.waiting:
            self._listening = True
            enough = min(len(self._in.waiting[0][0]), _WAKE_BYTES)
            if enough != self._woken_at:
                self._woken_at = enough
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
        wanted = (select.EPOLLIN if self._listening else 0) | (select.EPOLLOUT if self._out.waiting else 0)
        if wanted != self._asked:
            self._asked = wanted
            self._socket_loop.watch(self, wanted)
