"""The process at the other end of a connection: its outbox, and the threads that send and receive."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core.collectives.socket_stream import memory_of
from thinwire.core.duplex import Duplex, end_of
from thinwire.core.errors import PairError
from thinwire.systems.link.codec import FRAME, ROW_BYTES, Codec
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.tensor_sockets import TensorSockets

SLOWEST = 1e6 / 8
"""Bytes per second that a link must carry; a slower link counts as dead."""

logger = logging.getLogger("thinwire")


def allowance(size: int, seconds: float) -> float:
    """Return how long so many bytes may take, if the other side may be silent for ``seconds``."""
    return seconds + size / SLOWEST


class Peer:
    """Another process. Frames and tensors use sockets of their own, so frames never wait behind tensors.

    Before :meth:`start` both sides read and write directly; then threads send an outbox, and deliver messages.
    """

    def __init__(self, frames: Duplex, tensors: Duplex | TensorSockets, other: PeerIdentity) -> None:
        self._frames, self._tensors, self.other = frames, tensors, other
        self.sent_bytes = self.received_bytes = 0
        self._sending = threading.Lock()
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._control: list[Any] = []
        self._data: list[tuple[Any, int]] = []  # (message, how many without a tensor were posted before it)
        self._posted = self._sent = 0
        self._due = self._ending = self._over = False
        self._arriving: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
        self._channels = 1

    @property
    def host(self) -> str:
        return self._frames.host

    @property
    def crossed(self) -> tuple[int, int]:
        """Bytes sent and received with all that proofs and encryption add, but not to what several sockets carry."""
        ends = self._frames, self._tensors
        return sum(end.sent for end in ends), sum(end.received for end in ends)

    def send(self, message: Any, codec: Codec, seconds: float, frame_seconds: float | None = None) -> None:
        """Send a message with its rows and its tensor, for which the other side may take ``seconds`` beyond its bytes.

        ``frame_seconds``: as for :meth:`send_frame`.
        """
        tensor: Tensor | None = getattr(message, "tensor", None)
        size = 0 if tensor is None else tensor.nbytes
        self.send_frame(codec.encode(message, None, size), frame_seconds)
        if tensor is not None:
            self.send_tensor(tensor, allowance(size, seconds))

    def receive(self, codec: Codec, seconds: float, most_bytes: int) -> Any:
        """Receive what :meth:`send` sends; its tensor as ``uint8 [n]``."""
        message, size = self._head(codec, seconds, seconds, most_bytes)
        return self._with_tensor(message, size, seconds) if size else message

    def _head(self, codec: Codec, patience: float | None, seconds: float, most_bytes: int) -> tuple[Any, int]:
        """Receive the next message without its tensor, and the size of that."""
        message, rows, size = codec.decode(self.receive_frame(FRAME.size, patience))
        if size > most_bytes:
            raise ValueError(f"a message announces {size} bytes, but {codec.of} has at most {most_bytes} here")
        if rows:
            message = codec.with_rows(message, self.receive_frame(ROW_BYTES * rows, seconds))
        return message, size

    def _with_tensor(self, message: Any, size: int, seconds: float) -> Any:
        room = torch.empty(size, dtype=torch.uint8)
        return replace(message, tensor=self.receive_tensor(room, allowance(size, seconds)))

    def send_frame(self, frame: bytes, seconds: float | None = None) -> None:
        """Send bytes, in order with other frames; None: if the other side accepts nothing, only ``close`` ends that."""
        with self._sending:
            self.sent_bytes += len(frame)  # counted first, so that the receiver never finds it uncounted
            self._frames.write(frame, end_of(seconds))

    def receive_frame(self, size: int, seconds: float | None) -> bytes:
        """Receive exactly ``size`` bytes. Raises ``PairError`` if they do not come in time; None: no limit."""
        frame = self._frames.read(size, end_of(seconds))
        self.received_bytes += size
        return frame

    def send_tensor(self, x: Tensor, seconds: float) -> None:
        """Send a contiguous tensor; a frame must have announced it to the other side."""
        self.sent_bytes += x.nbytes
        self._tensors.write(memory_of(x), end_of(seconds))

    def receive_tensor(self, x: Tensor, seconds: float) -> Tensor:
        """Receive into ``x``, and return it. ``PairError``: incomplete in time; no further one can be received."""
        try:
            self._tensors.read_into(memory_of(x), end_of(seconds))
        except PairError as error:
            raise PairError(f"a tensor was not received: {error}") from error
        self.received_bytes += x.nbytes
        return x

    def start(
        self,
        codec: Codec,
        *,
        seconds: float,
        most_bytes: int,
        deliver: Callable[[Any], None],
        closed: Callable[[str], None],
        channels: int = 1,
        announced: Callable[[float], None] = lambda seconds: None,
        compose: Callable[[], Any | None] = lambda: None,
        silent: bool = False,
        beat: Any = None,
    ) -> None:
        """Begin to send what is posted and to deliver what arrives.

        ``seconds``: how long the other side may be silent (``silent``: for ever), and a tensor take beyond its bytes.
        ``deliver``: gets tensors as ``uint8 [n]``. ``closed``: called once with the reason, not after ``close``.
        ``channels`` 2: messages without a tensor overtake those with one, never the reverse. ``announced``: gets the
        seconds that a tensor may take. ``compose``: makes the report that ``report_due`` asks for. ``beat``: a message
        that is sent as a sign of life where there is no other for a third of ``seconds``.
        """
        self._codec, self._seconds, self._most_bytes, self._channels = codec, seconds, most_bytes, channels
        self._deliver, self._closed, self._announced, self._compose = deliver, closed, announced, compose
        self._patience, self._beat = None if silent else seconds, beat
        if isinstance(self._tensors, TensorSockets):
            self._tensors.bound(most_bytes)
        loops = [self._send_control, self._receive]
        if channels == 2:
            loops += [self._send_data, self._receive_data]
        for loop in loops:
            thread = threading.Thread(target=self._guard, args=(loop,), name=f"thinwire{loop.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)  # only now: another thread may be closing and joining this connection

    def post(self, message: Any) -> None:
        """Queue a message for sending, in order. Never blocks."""
        with self._lock:
            if self._channels == 2 and getattr(message, "tensor", None) is not None:
                self._data.append((message, self._posted))
            else:
                self._control.append(message)
                self._posted += 1
            self._lock.notify_all()

    @property
    def outbox(self) -> int:
        """How many messages wait, without those that are being sent."""
        return len(self._control) + len(self._data)

    def report_due(self) -> None:
        with self._lock:
            self._due = True
            self._lock.notify_all()

    def finish(self) -> None:
        """Close once everything posted has been sent."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()

    def close(self) -> None:
        """Close now: threads that wait on this side get an error, and ``closed`` is not called any more."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
        self._arriving.put(None)
        self._frames.close()
        self._tensors.close()

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    @property
    def ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            if not isinstance(error, (PairError, ValueError)):
                logger.exception("a connection ends because of a bug in thinwire")
            with self._lock:
                first, self._over = not self._over, True
            self.close()
            if first:
                self._closed(str(error))

    def _send_control(self) -> None:
        while True:
            with self._lock:
                while not (self._over or self._control or self._due or (self._ending and not self._data)):
                    if not self._lock.wait(self._seconds / 3) and self._beat is not None:
                        self._control.append(self._beat)
                        self._posted += 1
                if self._over:
                    return
                message = self._control.pop(0) if self._control else None
                reporting = message is None and self._due
                if reporting:
                    self._due = False
            if reporting:
                message = self._compose()
            if message is not None:
                self.send(message, self._codec, self._seconds)
                with self._lock:
                    self._sent += not reporting
                    self._lock.notify_all()
            elif not reporting:
                if isinstance(self._tensors, TensorSockets):
                    self._tensors.flush()
                self.close()
                return

    def _send_data(self) -> None:
        while True:
            with self._lock:
                # WELCOME may have left its queue but not been sent yet: a leader takes no weights before it.
                while not (self._over or (self._data and self._sent >= self._data[0][1])):
                    self._lock.wait()
                if self._over:
                    return
                message, _ = self._data[0]
            self.send(message, self._codec, self._seconds)
            with self._lock:
                self._data.pop(0)
                self._lock.notify_all()

    def _receive(self) -> None:
        while True:
            message, size = self._head(self._codec, self._patience, self._seconds, self._most_bytes)
            if not size:
                self._deliver(message)
                continue
            self._announced(allowance(size, self._seconds))
            if self._channels == 2:
                self._arriving.put((message, size))
            else:
                self._deliver(self._with_tensor(message, size, self._seconds))

    def _receive_data(self) -> None:
        while (arriving := self._arriving.get()) is not None:
            self._deliver(self._with_tensor(*arriving, self._seconds))


class LocalPeer:
    """A peer in this process: what is posted is delivered at once, by the thread that posts it, and never copied."""

    def __init__(self, deliver: Callable[[Any], None], closed: Callable[[str], None]) -> None:
        self.post, self._closed = deliver, closed

    def close(self) -> None:
        self._closed("the other side has closed")

    finish = close

    def join(self, seconds: float) -> None:
        pass
