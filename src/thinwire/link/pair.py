"""One end of a connection between two processes: frames, and beside them tensors."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from thinwire.link.duplex import Duplex, end_of
from thinwire.link.errors import PairError
from thinwire.link.hello import Badge
from thinwire.link.memory import memory_of


class Pair:
    """Frames and tensors travel over a socket each, so that frames never wait behind tensors. Sending and receiving may
    happen in two threads, frames and tensors in two more.

    Args:
        frames, tensors: the sockets.
        other: who is at the other end; of a listener only the role is known.
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
        """Send bytes, whole and in order with other frames. Where they are not taken, closing ends the wait.

        Raises:
            PairError: the other side has gone.
        """
        with self._sending:
            self.sent_bytes += len(frame)  # before: who has it must not find it uncounted
            self._frames.write(frame, math.inf)

    def receive_frame(self, size: int, seconds: float | None) -> bytes:
        """Exactly ``size`` bytes. Raises ``PairError`` if they do not come in time; None: there is no limit."""
        frame = self._frames.read(size, end_of(seconds))
        self.received_bytes += size
        return frame

    def send_tensor(self, x: Tensor, seconds: float) -> None:
        """Send a contiguous tensor; the other side must have been told of it by a frame."""
        self.sent_bytes += x.numel() * x.element_size()
        self._tensors.write(memory_of(x), end_of(seconds))

    def receive_tensor(self, x: Tensor, seconds: float) -> Tensor:
        """Receive into ``x``, which is returned.

        Raises:
            PairError: it did not come whole in the time; the pair is of no use any more.
        """
        try:
            self._tensors.read_into(memory_of(x), end_of(seconds))
        except PairError as error:
            raise PairError(f"a tensor did not pass: {error}") from error
        self.received_bytes += x.numel() * x.element_size()
        return x

    def close(self) -> None:
        """End all waits of this side."""
        self._frames.close()
        self._tensors.close()


def empty_bytes(size: int) -> Tensor:
    """Room for what arrives."""
    return torch.empty(size, dtype=torch.uint8)
