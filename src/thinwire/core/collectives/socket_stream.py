"""The connections of two ranks: messages one after another, each way, without headers; and the thread that moves them.

Only the tensors' bytes are sent. Both sides post the same messages in the same order, so the n-th message that one side
sends is the n-th that the other receives. Bytes that arrive before their receive is posted wait in the kernel. So the
transfer continues even while this process is not scheduled, whereas Gloo does a handshake for every message.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from thinwire.core.sockets import not_for_children

_PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8})  # numpy's too


def memory_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which they keep: slicing costs less than slicing a tensor."""
    if x.dtype in _PLAIN and x.numel():
        return memoryview(x.detach().numpy()).cast("B")  # type: ignore[arg-type]  # an array is a buffer
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def shares_memory(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, by ``expand``: it cannot be written to in place."""
    return any(size > 1 and not stride for size, stride in zip(x.shape, x.stride()))


class CountdownWork:
    """Ends when all its ``parts`` messages have, or with the first one's error, which ``failed`` is told.

    The thread that moves the last byte calls ``last`` before anyone is told of the end; its error becomes the work's.
    """

    def __init__(
        self, parts: int, last: Callable[[], None] | None = None, failed: Callable[[RuntimeError], None] | None = None
    ) -> None:
        self._left, self._last, self._failed = parts, last, failed
        self._lock, self._gate = threading.Lock(), threading.Lock()
        self._gate.acquire()  # waiting means acquiring it; much cheaper to make than an Event
        self._ended = False
        self._error: RuntimeError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def part_ended(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left or self._ended:
                return
        error = None
        if self._last is not None:
            try:
                self._last()
            except Exception as caught:  # the loop's thread must survive it, and waiting threads must get it
                error = (
                    caught if isinstance(caught, RuntimeError) else RuntimeError(f"{type(caught).__name__}: {caught}")
                )
        self._end(error)

    def fail(self, error: RuntimeError) -> None:
        self._end(error)

    def _end(self, error: RuntimeError | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._gate.release()
            callbacks, self._callbacks = self._callbacks, []
        if error is not None and self._failed is not None:
            self._failed(error)
        for callback in callbacks:
            with contextlib.suppress(RuntimeError):
                callback()

    def wait(self) -> None:
        """Wait until the work has ended. Raise the error of the first part that failed."""
        with self._gate:
            pass
        if self._error is not None:
            raise self._error

    def then(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()


_CHECK_SECONDS = 0.25
_process_loop: SocketLoop | None = None
_lock = threading.Lock()


class SocketUser(Protocol):
    """What a loop calls for one socket, whose descriptor is ``number``; ``check`` now and then."""

    number: int

    def on_data(self) -> None: ...
    def on_room(self) -> None: ...
    def hung_up(self) -> None: ...
    def check(self, now: float) -> None: ...
    def fail(self, error: Exception) -> None: ...


class SocketLoop:
    """Watches sockets and calls their streams when there is data, or room to send."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.streams: dict[int, SocketUser] = {}
        self.gone: set[int] = set()  # file descriptors closed since the last poll, which may be in use again
        threading.Thread(target=self._loop, name="thinwire-sockets", daemon=True).start()

    def add(self, stream: SocketUser) -> None:
        self.streams[stream.number] = stream
        self._epoll.register(stream.number, 0)

    def watch(self, stream: SocketUser, events: int) -> None:
        """Set what the stream waits for from now on, as epoll's event mask."""
        self._epoll.modify(stream.number, events)

    def remove(self, stream: SocketUser) -> None:
        if self.streams.pop(stream.number, None) is not None:
            self.gone.add(stream.number)
            with contextlib.suppress(OSError):
                self._epoll.unregister(stream.number)

    def _loop(self) -> None:
        checked = time.monotonic()
        with torch.no_grad():
            while True:
                self.gone.clear()
                for number, happened in self._epoll.poll(_CHECK_SECONDS):
                    stream = self.streams.get(number)
                    if stream is None or number in self.gone:
                        continue
                    try:
                        self._serve(stream, happened)
                    except Exception as error:  # an error of one stream must not affect the others
                        stream.fail(error)
                if (now := time.monotonic()) - checked >= _CHECK_SECONDS:
                    checked = now
                    for stream in list(self.streams.values()):
                        try:
                            stream.check(now)
                        except Exception as error:
                            stream.fail(error)

    @staticmethod
    def _serve(stream: SocketUser, happened: int) -> None:
        if happened & select.EPOLLIN:
            stream.on_data()
        if happened & select.EPOLLOUT:
            stream.on_room()
        if happened & (select.EPOLLHUP | select.EPOLLERR):
            stream.hung_up()


def socket_loop() -> SocketLoop:
    global _process_loop
    with _lock:
        _process_loop = _process_loop or SocketLoop()
        return _process_loop


def _after_fork() -> None:
    """Reset the loop in a forked child: it lacks the parent's thread, and must not unregister the shared sockets."""
    global _process_loop, _lock
    if _process_loop is not None:
        _process_loop.streams.clear()
    _process_loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


_CLOSED = "the other side has closed it"
_WAKE_BYTES = 1 << 20  # bytes, or the rest of a message, for which a receiver is woken; half as many cost 3 %


@dataclass(eq=False)
class _Way:
    """One direction: what is left of its messages, in order; and when a byte last moved, or could first have moved."""

    waiting: deque[tuple[memoryview, CountdownWork]] = field(default_factory=deque)
    moved: float = 0.0


class Stream:
    """One end of a connection, which it owns, shared by the threads that post messages and the loop that moves them.

    After ``timeout`` seconds without a byte, a waiting message and all after it fail; errors name the ``peer``.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: float, loop: SocketLoop) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._peer, self._timeout, self._socket_loop = not_for_children(connection), peer, timeout, loop
        self._out, self._in = _Way(), _Way()
        self._lock = threading.RLock()
        self._error: RuntimeError | None = None
        self._woken_at, self._listening, self._asked = 1, False, 0
        self.number = connection.fileno()
        loop.add(self)

    def send(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post a contiguous CPU tensor, or its :func:`memory_of`; send at once what the kernel accepts."""
        if self._post(self._out, x, work):
            self.on_room()

    def receive(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post the place for the next message: a contiguous CPU tensor of its size, or its :func:`memory_of`."""
        if self._post(self._in, x, work):
            with self._lock:
                self._ask()

    def _post(self, way: _Way, x: Tensor | memoryview, work: CountdownWork) -> bool:
        """Return whether the message is the only one waiting, so that the caller must start it."""
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
        self._move(self._out, self.socket.send)

    def on_data(self) -> None:
        """Receive the next message, or the part that has arrived; the loop calls again if there is more."""
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
                    ):  # the kernel's buffer is full, or holds only a small remainder: the loop will call again
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
        if self._in.waiting and now - self._in.moved > self._timeout / 2:
            self.on_data()  # there may be fewer bytes than the kernel wakes for
        with self._lock:
            still = [now - way.moved for way in (self._in, self._out) if way.waiting]
            if still and max(still) > self._timeout:
                self._fail(RuntimeError(f"timed out: {self._peer} moved no byte for {self._timeout:.0f} seconds"))

    def hung_up(self) -> None:
        """End the stream because the other side is gone. Bytes that arrived before count."""
        self._move(self._in, self.socket.recv_into)
        self._lost(ConnectionResetError(_CLOSED))

    def fail(self, error: Exception) -> None:
        self._fail(RuntimeError(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Close the connection; messages that still wait get an error."""
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
        """Tell the loop and the kernel what this waits for; the lock must be held.

        It keeps listening after the last message: the next one is likely to be posted before any byte of it arrives.
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
