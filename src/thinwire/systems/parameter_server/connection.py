"""Messages over a pair: queues, the threads that empty them, and what happens when the other side is gone."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.systems.link.errors import PairError
from thinwire.systems.link.pair import Pair, empty_bytes
from thinwire.systems.parameter_server.messages import (
    FRAME,
    ROW_BYTES,
    Local,
    Message,
    decode,
    decode_rows,
    encode,
    encode_rows,
)
from thinwire.systems.parameter_server.shard_messages import ShardMessage

SLOWEST = 1e6 / 8
"""Bytes per second that a link must carry; a slower link counts as dead."""
_MOST_ROWS = 1 << 16

logger = logging.getLogger("thinwire")

Anything = Message | Local | ShardMessage


class Connection:
    """Sends messages in order and delivers received ones, each from its own threads.

    Args:
        pair: the connection.
        channels: 1: strict order. 2: messages without a tensor overtake those with one, in both directions, never the
            reverse.
        seconds: how long the other side may be silent, and how long a tensor may take beyond its bytes.
        most_bytes: the largest tensor to accept, see :func:`packing.most_bytes`; checked before memory is allocated.
        deliver: called with every message; a tensor arrives as bytes, ``uint8 [n]``.
        closed: called once with the reason if the connection ends without a call of ``close``.
        announced: called with the seconds that a tensor on its way may take.
        compose: makes the report that ``report_due`` asks for, when the control channel is free.
        silent: the other side may be silent for any length of time; another connection shows whether it lives.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        channels: int,
        seconds: float,
        most_bytes: int,
        deliver: Callable[[Anything], None],
        closed: Callable[[str], None],
        announced: Callable[[float], None] = lambda seconds: None,
        compose: Callable[[], Anything | None] | None = None,
        silent: bool = False,
    ) -> None:
        self._pair, self._seconds, self._channels, self._most_bytes = pair, seconds, channels, most_bytes
        self._patience = None if silent else seconds
        self._deliver, self._closed, self._announced, self._compose = deliver, closed, announced, compose
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._control: list[Anything] = []
        self._data: list[tuple[Anything, int]] = []  # (message, how many without a tensor were posted before it)
        self._posted = self._sent = 0
        self._due = self._ending = self._over = False
        self._arriving: queue.SimpleQueue[tuple[Anything, int] | None] = queue.SimpleQueue()

    def start(self) -> Connection:
        """Start the threads; nothing is delivered before."""
        loops = [self._send_control, self._receive]
        if self._channels == 2:
            loops += [self._send_data, self._receive_data]
        for loop in loops:
            thread = threading.Thread(target=self._guard, args=(loop,), name=f"thinwire{loop.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)  # only now: another thread may be closing and joining this connection
        return self

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the threads have ended."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def pair(self) -> Pair:
        """The underlying connection, for its byte counts."""
        return self._pair

    def post(self, message: Anything) -> None:
        """Queue a message for sending, in order. Never blocks."""
        with self._lock:
            apart = self._channels == 2 and getattr(message, "tensor", None) is not None
            if apart:
                self._data.append((message, self._posted))
            else:
                self._control.append(message)
                self._posted += 1
            self._lock.notify_all()

    def report_due(self) -> None:
        """Ask for a report as soon as the control channel is free."""
        with self._lock:
            self._due = True
            self._lock.notify_all()

    def finish(self) -> None:
        """Close once everything posted has been sent."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()

    def close(self) -> None:
        """Close now; ``closed`` is not called afterwards."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
        self._arriving.put(None)
        self._pair.close()

    # --- threads --------------------------------------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            if not isinstance(error, (PairError, ValueError)):
                logger.exception("a connection of the parameter server ends because of a bug in thinwire")
            with self._lock:
                first, self._over = not self._over, True
                self._lock.notify_all()
            self._arriving.put(None)
            self._pair.close()
            if first:
                self._closed(str(error))

    def _send_control(self) -> None:
        while True:
            with self._lock:
                while not (self._over or self._control or self._due or (self._ending and not self._data)):
                    self._lock.wait()
                if self._over:
                    return
                message: Anything | None = self._control.pop(0) if self._control else None
                reporting = message is None and self._due
                if reporting:
                    self._due = False
            if reporting and self._compose is not None:
                message = self._compose()
            if message is not None:
                self._send(message)
                with self._lock:
                    self._sent += not reporting
                    self._lock.notify_all()
            elif not reporting:
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
            self._send(message)
            with self._lock:
                self._data.pop(0)
                self._lock.notify_all()

    def _send(self, message: Anything) -> None:
        tensor: Tensor | None = getattr(message, "tensor", None)
        rows = encode_rows(message)
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        self._pair.send_frame(encode(message, len(rows) // ROW_BYTES, size) + rows)
        if tensor is not None:
            self._pair.send_tensor(tensor, self.allowance(size))

    def _receive(self) -> None:
        while True:
            message: Any
            message, rows, size = decode(self._pair.receive_frame(FRAME.size, self._patience))
            if rows > _MOST_ROWS:
                raise ValueError(f"a message announces {rows} gradients, which no node has")
            if size > self._most_bytes:
                raise ValueError(f"a message announces {size} bytes, but this model has at most {self._most_bytes}")
            if rows:
                table = self._pair.receive_frame(ROW_BYTES * rows, self._seconds)
                message = replace(message, rows=decode_rows(message, table))
            if not size:
                self._deliver(message)
                continue
            self._announced(self.allowance(size))
            if self._channels == 2:
                self._arriving.put((message, size))
            else:
                self._deliver(self._with_tensor(message, size))

    def _receive_data(self) -> None:
        while True:
            arriving = self._arriving.get()
            if arriving is None:
                return
            self._deliver(self._with_tensor(*arriving))

    def _with_tensor(self, message: Any, size: int) -> Anything:
        tensor: Any = self._pair.receive_tensor(empty_bytes(size), self.allowance(size))
        received: Anything = replace(message, tensor=tensor)
        return received

    def allowance(self, size: int) -> float:
        """Return the seconds that a tensor of ``size`` bytes may take."""
        return self._seconds + size / SLOWEST
