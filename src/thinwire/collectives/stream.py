"""One TCP connection between two ranks: messages one after another, each way, without a word about them.

Nothing travels but the tensors' bytes. Both sides post the same messages in the same order, so the n-th that one sends
is the n-th that the other receives. What arrives before its receive is posted waits in the kernel: the wire goes on
also while this process is not scheduled, which Gloo's handshake for every message does not let it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.collectives.delivery import Delivery

if TYPE_CHECKING:
    from thinwire.collectives.courier import Courier

_CLOSED = "the other side has closed it"
_WAKE_BYTES = 512 << 10  # a receiver is woken for so many bytes, or for the rest of a message


@dataclass(eq=False)
class _Message:
    """What is left of it; ``tensor`` keeps the memory alive."""

    left: memoryview
    delivery: Delivery
    tensor: Tensor


class Stream:
    """One end of a connection, shared by who posts messages and the courier that moves them.

    Args:
        connection: a connected TCP socket, owned from now on.
        peer: how to call the other side in errors.
        timeout: seconds without a byte after which a waiting message fails, and all after it.
        courier: who watches over the socket.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout: float, courier: Courier) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._peer, self._timeout, self._courier = connection, peer, timeout, courier
        self._out: deque[_Message] = deque()
        self._in: deque[_Message] = deque()
        self._moved_out = self._moved_in = 0.0  # when a byte last moved, or could have begun to
        self._lock = threading.RLock()
        self._error: RuntimeError | None = None
        self._woken_at = 1
        self.number = connection.fileno()
        courier.add(self)

    def send(self, x: Tensor, delivery: Delivery) -> None:
        """Post a contiguous CPU tensor; what the kernel takes at once is on its way when this returns."""
        if not x.nbytes:
            return delivery.part_ended()
        with self._lock:
            if (error := self._error) is None:
                if not self._out:
                    self._moved_out = time.monotonic()
                self._out.append(_Message(_bytes(x), delivery, x))
                if len(self._out) > 1:
                    return
        if error is None:
            self.on_room()
        else:
            delivery.fail(error)

    def receive(self, x: Tensor, delivery: Delivery) -> None:
        """Post the place for the next message: a contiguous CPU tensor of its size."""
        if not x.nbytes:
            return delivery.part_ended()
        with self._lock:
            if (error := self._error) is None:
                self._in.append(_Message(_bytes(x), delivery, x))
                if len(self._in) == 1:
                    self._moved_in = time.monotonic()
                    self._ask()
                return
        delivery.fail(error)

    def on_room(self) -> None:
        """Send what the kernel takes."""
        ended: list[Delivery] = []
        with self._lock:
            try:
                while self._out:
                    head = self._out[0]
                    sent = self._socket.send(head.left)
                    self._moved_out = time.monotonic()
                    head.left = head.left[sent:]
                    if not head.left:
                        ended.append(self._out.popleft().delivery)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost(error)
            self._ask()
        for delivery in ended:
            delivery.part_ended()

    def on_data(self) -> None:
        """Take in what has arrived."""
        ended: list[Delivery] = []
        with self._lock:
            try:
                while self._in:
                    head = self._in[0]
                    got = self._socket.recv_into(head.left)
                    if not got:
                        raise ConnectionResetError(_CLOSED)
                    self._moved_in = time.monotonic()
                    head.left = head.left[got:]
                    if head.left:
                        break  # the courier calls again; reading on now would find crumbs
                    ended.append(self._in.popleft().delivery)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost(error)
            self._ask()
        for delivery in ended:
            delivery.part_ended()

    def check(self, now: float) -> None:
        """Fail if a message has waited too long without a byte."""
        if self._in and now - self._moved_in > self._timeout / 2:
            self.on_data()  # fewer bytes than the kernel wakes for
        with self._lock:
            still = [
                now - moved for queue, moved in ((self._in, self._moved_in), (self._out, self._moved_out)) if queue
            ]
            if still and max(still) > self._timeout:
                self._fail(RuntimeError(f"timed out: {self._peer} moved no byte for {self._timeout:.0f} seconds"))

    def hung_up(self) -> None:
        """The other side is gone. What has arrived before counts."""
        self.on_data()
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
            self._courier.remove(self)
            with contextlib.suppress(OSError):
                self._socket.close()
            waiting = [message.delivery for message in (*self._in, *self._out)]
            self._in.clear()
            self._out.clear()
        for delivery in waiting:
            delivery.fail(error)

    def _ask(self) -> None:
        """Tell the courier and the kernel what this waits for; the lock is held."""
        if self._error is not None:
            return
        if self._in:
            enough = max(1, min(len(self._in[0].left), _WAKE_BYTES))
            if enough != self._woken_at:
                self._woken_at = enough
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
        self._courier.watch(self, data=bool(self._in), room=bool(self._out))


def _bytes(x: Tensor) -> memoryview:
    flat = x.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer
