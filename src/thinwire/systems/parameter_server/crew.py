"""The workers of a node as its leader sees them: which are connected, which weights each has, what each hands in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import RLock

from torch import Tensor

from thinwire.systems.link.hello import check_badge
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.secret import Trust, own_trust
from thinwire.systems.parameter_server.buffers import BufferLayout
from thinwire.systems.parameter_server.connection import Anything, Connection
from thinwire.systems.parameter_server.effects import Start
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.messages import FRAME, Buffers, Enter, Ping, Result, Stop, Work, decode
from thinwire.systems.parameter_server.packing import most_bytes
from thinwire.systems.parameter_server.settings import Settings

LONG_LEASES = 6.0

logger = logging.getLogger("thinwire")


class Crew:
    """Connections to the workers of this machine over its loopback interface; workers may die and come back.

    Args:
        settings, layout: the server's, sent to the workers.
        workers: W, number of workers.
        port: 0 chooses a free one.
        trust: the node's; workers must show the same certificate, or prove that they know the same secret. None:
            neither.
        lock: held in every call of ``came``, ``lost`` and ``result``.
        came, lost: called with the number of a worker.
        result: called with the worker's number and what it handed in.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        workers: int,
        port: int,
        trust: Trust,
        lock: RLock,
        *,
        came: Callable[[int], None],
        lost: Callable[[int], None],
        result: Callable[[int, Result], None],
    ) -> None:
        self._settings, self._size, self._lock = settings, workers, lock
        self._came, self._lost, self._result = came, lost, result
        self._buffer_layout: BufferLayout = layout.buffers
        self._there: dict[int, Connection] = {}
        self._seen: set[int] = set()
        self._given: dict[int, Tensor] = {}  # worker -> the weights that it has
        self._buffers: dict[int, Tensor] = {}
        self._late_at: dict[int, float] = {}
        self._long = LONG_LEASES * settings.lease_seconds
        self._farewell: tuple[Anything, ...] = ()
        notes = {"settings": settings.to_json(), "layout": layout.to_json()}
        self._most_bytes = most_bytes(settings, layout)
        self._listener = Listener(port, "127.0.0.1", notes, roles=("worker",), trust=own_trust(trust))

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self._listener.port

    def open(self) -> None:
        self._listener.serve(self._enter, FRAME.size)

    def give(self, start: Start, theta: Tensor) -> None:
        """Let a worker begin; the weights are sent only if it does not have them already."""
        connection = self._there.get(start.worker)
        if connection is None:
            return
        new = self._given.get(start.worker) is not theta
        self._given[start.worker] = theta
        self._late_at[start.worker] = time.monotonic() + self._long
        connection.post(Work(start.token, start.version, start.step, start.steps, theta if new else None))

    def buffers(self) -> Tensor | None:
        """Return the mean of the buffers that the workers last sent, ``[B]``; None if none did."""
        return self._buffer_layout.mean(list(self._buffers.values())) if self._buffers else None

    def ping(self) -> None:
        """Send a sign of life to all workers. Name one that lives and is long about its work, but do not give it up."""
        for connection in self._there.values():
            connection.post(Ping())
        late = [number for number, at in self._late_at.items() if time.monotonic() > at]
        for number in late:
            del self._late_at[number]
            logger.warning("worker %d is alive but has handed in nothing for %g s", number, self._long)
        self._long *= 2.0 if late else 1.0  # it may always take as long: say so a few times only

    def end(self, version: int, theta: Tensor | None, buffers: Tensor | None) -> None:
        """Tell all workers, also those that come later, that training is over; each then closes its connection."""
        first = (Buffers(0, buffers),) if buffers is not None else ()
        self._farewell = (*first, Stop(0, version, theta))
        for connection in self._there.values():
            for message in self._farewell:
                connection.post(message)

    def see_off(self, seconds: float) -> None:
        """After the end: wait up to ``seconds`` for workers that have not connected yet.

        Such a worker, finding nobody, would think that its node has not started yet.
        """
        end = time.monotonic() + seconds
        while len(self._seen) < self._size and time.monotonic() < end:
            time.sleep(0.02)

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the workers to leave, then close the remaining connections."""
        end = time.monotonic() + seconds
        while self._there and time.monotonic() < end:
            time.sleep(0.01)
        self._listener.close()
        with self._lock:
            left = list(self._there.values())
        for connection in left:
            connection.close()
        for connection in left:
            connection.join(2.0)

    def refuse(self) -> None:
        """Accept no more workers."""
        self._listener.close()

    # --- connections ----------------------------------------------------------------------------------------------

    def _enter(self, pair: Pair, hello: bytes) -> None:
        message, _, _ = decode(hello)
        if not isinstance(message, Enter) or not 0 <= message.worker < self._size:
            raise ValueError("it does not begin as a worker does")
        check_badge(pair.other, "worker", message.worker)
        number = message.worker
        box: list[Connection] = []

        def deliver(message: Anything) -> None:
            with self._lock:
                if self._there.get(number) is not box[0]:
                    return
                if isinstance(message, Result):
                    self._late_at.pop(number, None)
                    self._result(number, message)
                elif isinstance(message, Buffers):
                    self._buffers[number] = self._buffer_layout.read(message.tensor)

        def closed(reason: str) -> None:
            with self._lock:
                if self._there.get(number) is box[0]:
                    self._forget(number)

        lease = self._settings.lease_seconds
        box.append(
            Connection(pair, channels=1, seconds=lease, most_bytes=self._most_bytes, deliver=deliver, closed=closed)
        )
        with self._lock:
            old = self._there.get(number)
            if old is not None:
                old.close()
                self._forget(number)
            self._there[number] = box[0]
            self._seen.add(number)
            for farewell in self._farewell:
                box[0].post(farewell)
            if not self._farewell:
                self._came(number)
        box[0].start()  # start after registering: messages are delivered only to registered workers

    def _forget(self, number: int) -> None:
        del self._there[number]
        self._given.pop(number, None)
        self._buffers.pop(number, None)
        self._late_at.pop(number, None)
        self._lost(number)
