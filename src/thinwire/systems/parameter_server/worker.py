"""A worker: gets weights from the leader of its node, computes, and hands the result back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from thinwire.predict.measure.profile_model import Batches, Loss, numbered
from thinwire.systems.link.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import Badge
from thinwire.systems.link.meeting import Meeting
from thinwire.systems.link.secret import find_trust, own_trust
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server.connection import Anything, Connection
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.local_work import LocalWork, local_gradient
from thinwire.systems.parameter_server.messages import Buffers, Enter, Ping, Result, Stop, Work, encode
from thinwire.systems.parameter_server.packing import most_bytes
from thinwire.systems.parameter_server.settings import Settings

logger = logging.getLogger("thinwire")


class ServerLost(RuntimeError):
    """No server or leader answered for six leases."""


class NodeRefused(RuntimeError):
    """The server refuses this node."""


@dataclass
class WorkerStats:
    """Statistics of a worker.

    Attributes:
        submissions: number handed in; steps: batches computed; samples: in these batches.
        compute_seconds: spent in steps; waiting_seconds: spent waiting for weights.
        version: of the last weights; losses: (seconds since its start, loss) of each submission's last batch.
    """

    submissions: int = 0
    steps: int = 0
    samples: int = 0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0
    version: int = -1
    losses: list[tuple[float, float]] = field(default_factory=list)


class Worker:
    """One worker of a node.

    Args:
        model: trained in place; at the end it holds the server's final weights.
        batches: number -> this worker's batch of that number; or an iterable, which restarts when it is exhausted.
        loss: (model, batch) -> mean loss.
        leader: ``host:port`` of the node's leader.
        number: of this worker in its node.
        slowdown: emulates a slower machine: each step takes that many times as long, by sleeping.
        pace_seconds: emulates a machine with its own cores: each step takes at least this time, times slowdown.
        on_step: called with the seconds since the start and the loss.
        check: called before each attempt to reach the leader; may raise.
        gradient: (flat parameters, number of the batch) -> flat gradient, loss, samples; by default that of
            ``loss``.
        secret: the leader's; by default that of ``THINWIRE_SECRET_FILE``.
        keys: the leader's.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        loss: Loss,
        leader: str,
        number: int,
        *,
        slowdown: float = 1.0,
        pace_seconds: float = 0.0,
        on_step: Callable[[float, float], None] = lambda seconds, loss: None,
        check: Callable[[], object] = lambda: None,
        gradient: Callable[[Tensor, int], tuple[Tensor, float, int]] | None = None,
        secret: str | bytes | None = None,
        keys: str | Path | Credentials | None = None,
    ) -> None:
        self.model, self._leader, self.number = model, leader, number
        self._slowdown, self._pace, self._on_step, self._check = slowdown, pace_seconds, on_step, check
        if not slowdown >= 1:
            raise ValueError(f"slowdown={slowdown!r} must be at least 1")
        self.layout = Layout.of(model)
        self._take = gradient or partial(local_gradient, model, self.layout, numbered(batches), loss)
        self.stats = WorkerStats()
        self._badge = Badge("worker", number, own_trust(find_trust(secret, keys)))
        self._inbox: queue.SimpleQueue[Anything | str] = queue.SimpleQueue()
        self._theta: Tensor | None = None
        self._began = time.monotonic()
        self._last_loss, self._last_samples = 0.0, 0

    def run(self) -> WorkerStats:
        """Work until the server sends STOP.

        Raises:
            ServerLost: the leader has gone and does not come back.
            LayoutMismatch: this model differs from the server's.
            NodeRefused: the leader uses another secret, or other keys.
        """
        been, lost_at, lease = False, None, 10.0
        while True:
            self._check()
            try:
                meeting = Meeting(self._leader, self._badge)
                settings = Settings.from_json(meeting.note("settings"))
                self.layout.check(Layout.from_json(meeting.note("layout")))
                lease = settings.lease_seconds
                pair = meeting.connect(encode(Enter(self.number)))
            except PairError as error:
                if isinstance(error, NotAdmitted) and not been:  # later, another program may have the port
                    raise NodeRefused(f"worker {self.number}: {error}") from error
                lost_at = time.monotonic() if lost_at is None else lost_at
                if time.monotonic() - lost_at > 6 * lease:
                    raise ServerLost(f"worker {self.number} can no longer reach its leader: {error}") from error
                time.sleep(min(0.5, lease / 4))
                continue
            been, lost_at = True, None
            inbox: queue.SimpleQueue[Anything | str] = queue.SimpleQueue()
            self._inbox = inbox
            most = most_bytes(settings, self.layout)
            connection = Connection(
                pair, channels=1, seconds=lease, most_bytes=most, deliver=inbox.put, closed=inbox.put
            )
            averaged = settings.buffers == "average" and self.layout.buffers.numel > 0
            if self._serve(connection.start(), LocalWork(settings.local_update), lease, averaged):
                return self.stats

    def _serve(self, connection: Connection, work: LocalWork, lease: float, averaged: bool) -> bool:
        """Serve one connection. Return True when training has ended."""
        last: Tensor | None = None
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(connection, lease, ended), daemon=True)
        beat.start()
        try:
            while True:
                since = time.monotonic()
                message = self._inbox.get()
                self.stats.waiting_seconds += time.monotonic() - since
                if isinstance(message, str):
                    return False
                if isinstance(message, Stop):
                    if message.version < 0:
                        self._check()
                        raise ServerLost(f"worker {self.number}: its node has given up; the leader's output says why")
                    if not self.stats.submissions:
                        logger.warning(
                            "worker %d arrived after training had ended, at version %d: it takes the last weights",
                            self.number,
                            message.version,
                        )
                    if message.tensor is not None:
                        self.layout.write(self.layout.read(message.tensor), self.model)
                        self.stats.version = message.version
                    if last is not None:
                        self.layout.buffers.write(last, self.model)
                    return True
                if isinstance(message, Buffers):  # comes before the STOP
                    last = self.layout.buffers.read(message.tensor)
                if isinstance(message, Work):
                    result = self._compute(message, work)
                    if averaged:
                        connection.post(Buffers(0, self.layout.buffers.flat(self.model)))
                    connection.post(result)
        finally:
            ended.set()
            # after an error too: the process may live on, and the leader would wait for a lease
            connection.finish()
            connection.join(2.0)

    @staticmethod
    def _beat(connection: Connection, lease: float, ended: threading.Event) -> None:
        """Send signs of life, in a separate thread, so that a long step does not look like silence."""
        while not ended.wait(lease / 3):
            connection.post(Ping())

    def _compute(self, message: Work, work: LocalWork) -> Result:
        if message.tensor is not None:
            self._theta = self.layout.read(message.tensor)
        assert self._theta is not None
        began = time.monotonic()
        self._last_samples = 0
        result = work.submission(self._theta, message.step, message.steps, self._gradient)
        took = time.monotonic() - began
        time.sleep(max(0.0, self._slowdown * max(took, self._pace * message.steps) - took))
        seconds = time.monotonic() - began
        stats = self.stats
        stats.submissions += 1
        stats.steps += message.steps
        stats.samples += self._last_samples
        stats.compute_seconds += seconds
        stats.version = message.version
        stats.losses.append((time.monotonic() - self._began, self._last_loss))
        finite = bool(result.isfinite().all())
        return Result(
            message.token, self._last_samples, self._last_loss, seconds / message.steps, result if finite else None
        )

    def _gradient(self, theta: Tensor, batch: int) -> Tensor:
        """Return the flat gradient of one batch at ``theta``."""
        flat, self._last_loss, samples = self._take(theta, batch)
        self._last_samples += samples
        self._on_step(time.monotonic() - self._began, self._last_loss)
        return flat
