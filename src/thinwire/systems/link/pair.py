"""One end of a connection between two processes: frames and tensors."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from thinwire.core.collectives.sockets import memory_of
from thinwire.systems.link.duplex import Duplex, end_of
from thinwire.systems.link.errors import PairError
from thinwire.systems.link.hello import Badge


class Pair:
    """Frames and tensors use one socket each, so frames never wait behind tensors.

    Sending and receiving may happen in two threads, and for frames and tensors in two more.

    Args:
        frames, tensors: the sockets.
        other: the process at the other end; if it is a listener, only its role is known.
    """

    def __init__(self, frames: Duplex, tensors: Duplex, other: Badge) -> None:
        self._frames, self._tensors, self.other = frames, tensors, other
        self._sending = threading.Lock()
        self.sent_bytes = self.received_bytes = 0

    @property
    def host(self) -> str:
        """The other side's address."""
        return self._frames.host

    def send_frame(self, frame: bytes) -> None:
        """Send bytes, in order with other frames. If the other side accepts nothing, only ``close`` ends the wait.

        Raises:
            PairError: the other side has gone.
        """
        with self._sending:
            self.sent_bytes += len(frame)  # counted first, so that the receiver never finds it uncounted
            self._frames.write(frame, math.inf)

    def receive_frame(self, size: int, seconds: float | None) -> bytes:
        """Receive exactly ``size`` bytes. Raises ``PairError`` if they do not come in time; None: no limit."""
        frame = self._frames.read(size, end_of(seconds))
        self.received_bytes += size
        return frame

    def send_tensor(self, x: Tensor, seconds: float) -> None:
        """Send a contiguous tensor; a frame must have announced it to the other side."""
        self.sent_bytes += x.numel() * x.element_size()
        self._tensors.write(memory_of(x), end_of(seconds))

    def receive_tensor(self, x: Tensor, seconds: float) -> Tensor:
        """Receive into ``x``, and return it.

        Raises:
            PairError: it did not arrive completely in time; the pair cannot be used any more.
        """
        try:
            self._tensors.read_into(memory_of(x), end_of(seconds))
        except PairError as error:
            raise PairError(f"a tensor was not received: {error}") from error
        self.received_bytes += x.numel() * x.element_size()
        return x

    def close(self) -> None:
        """Close both sockets; threads that wait on this side get an error."""
        self._frames.close()
        self._tensors.close()


def empty_bytes(size: int) -> Tensor:
    """Return an uninitialised buffer for data to arrive."""
    return torch.empty(size, dtype=torch.uint8)
