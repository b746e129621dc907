"""The one thread of a process that moves bytes on all its streams."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from thinwire.core.collectives.stream import Stream

_CHECK_SECONDS = 0.25
_process_loop: SocketLoop | None = None
_lock = threading.Lock()


class SocketLoop:
    """Watches sockets and calls their streams when there is data, or room to send; see ``stream.py``."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.streams: dict[int, Stream] = {}
        self.gone: set[int] = set()  # file descriptors closed since the last poll, which may be in use again
        threading.Thread(target=self._loop, name="thinwire-sockets", daemon=True).start()

    def add(self, stream: Stream) -> None:
        """Add a new stream, which waits for nothing yet."""
        self.streams[stream.number] = stream
        self._epoll.register(stream.number, 0)

    def watch(self, stream: Stream, events: int) -> None:
        """Set what the stream waits for from now on, as epoll's event mask."""
        self._epoll.modify(stream.number, events)

    def remove(self, stream: Stream) -> None:
        """Remove a stream that is about to be closed."""
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
    def _serve(stream: Stream, happened: int) -> None:
        if happened & select.EPOLLIN:
            stream.on_data()
        if happened & select.EPOLLOUT:
            stream.on_room()
        if happened & (select.EPOLLHUP | select.EPOLLERR):
            stream.hung_up()


def socket_loop() -> SocketLoop:
    """Return this process's loop; made at the first call."""
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
