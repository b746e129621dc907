"""Several sockets that carry a peer's tensors together, where the wire is long, in place of one connection."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from thinwire.core.collectives.bundle import FRAME_BYTES, Accept, Bundle, Call
from thinwire.core.collectives.socket_stream import CountdownWork, socket_loop
from thinwire.core.duplex import SILENT, Duplex
from thinwire.core.errors import PairError, PairTimeout
from thinwire.core.tcp_info import active_sockets

_UNMOVED_SECONDS = 900.0  # after which whatever waits without a deadline fails, as in the kernel
_EARLY_FRAMES, _EARLY_TENSORS = 2048, 4  # that may come before this side reads them


class TensorSockets:
    """What :class:`Duplex` is to a peer's tensors. A lost socket is opened again; all of them lost end it."""

    def __init__(self, connections: Sequence[Duplex], accept: Accept | None = None, call: Call | None = None) -> None:
        self.sent, self.received = (sum(n) for n in zip(*((one.sent, one.received) for one in connections)))
        sockets, host = [one.release() for one in connections], connections[0].host
        active = active_sockets(sockets, len(sockets))
        self._bundle = Bundle(sockets, host, _UNMOVED_SECONDS, socket_loop(), accept=accept, call=call, active=active)
        self._stream = self._bundle.stream()
        self._closed = ""
        self.bound(0)

    def bound(self, most_bytes: int) -> None:
        """Say how long the longest tensor is: a side that sends many which nobody reads ends the connection."""
        self._bundle.keep_at_most(_EARLY_FRAMES + _EARLY_TENSORS * most_bytes // FRAME_BYTES)

    def write(self, data: memoryview, end: float) -> None:
        """Send a message. ``PairError``: the other side did not accept it in time, or has gone."""
        self._move(self._stream.send, data, end)
        self.sent += len(data)

    def read_into(self, view: memoryview, end: float) -> None:
        """Receive the next message, which is as long as ``view``. ``PairError``: it did not come whole in time."""
        self._move(self._stream.receive, view, end)
        self.received += len(view)

    def _move(self, post: Callable[[memoryview, CountdownWork], None], view: memoryview, end: float) -> None:
        if self._closed:
            raise PairError(self._closed)
        work, over = CountdownWork(1), threading.Event()
        work.then(over.set)
        post(view, work)
        if not over.wait(None if end == math.inf else max(0.0, end - time.monotonic())):
            self.close(SILENT)  # nothing may be written into the view any more
            raise PairTimeout(SILENT)
        try:
            work.wait()
        except RuntimeError as error:
            raise PairError(self._closed or f"the other side has gone ({error})") from error

    def flush(self) -> None:
        """Wait some seconds until the other side has everything, then close."""
        self._bundle.close()

    def close(self, why: str = "this connection is closed") -> None:
        """Close the sockets at once; a thread that still reads or writes gets an error with the reason ``why``."""
        self._closed = self._closed or why
        self._bundle.close(0.0)


def together(
    connections: Sequence[Duplex], accept: Accept | None = None, call: Call | None = None
) -> Duplex | TensorSockets:
    """Return what carries a peer's tensors over these connections, which both sides give in the same order."""
    return connections[0] if len(connections) == 1 else TensorSockets(connections, accept, call)
