"""A worker: gets weights from the leader of its node, computes, and hands the result back."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_number
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.predict.measure.profile_model import Batches, Loss, numbered
from thinwire.systems.link.actor import find
from thinwire.systems.link.hello import PeerIdentity, Trust, find_trust, own_trust
from thinwire.systems.link.listener import Caller
from thinwire.systems.link.peer import LocalPeer, Peer
from thinwire.systems.parameter_server.compress import most_bytes
from thinwire.systems.parameter_server.errors import NodeRefused, ServerLost
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.messages import CODEC, Buffers, Enter, Ping, Result, Stop, Work, encode
from thinwire.systems.parameter_server.node import Node
from thinwire.systems.parameter_server.settings import Settings

"""(flat parameters, number of the batch) -> flat gradient."""

logger = logging.getLogger("thinwire")


def local_gradient(
    model: nn.Module, layout: Layout, take: Callable[[int], Any], loss: Loss, theta: Tensor, number: int
) -> tuple[Tensor, float, int]:
    """Return the flat gradient ``[D]`` of batch ``number`` at ``theta`` ``[D]``, its loss and its samples."""
    batch = take(number)
    layout.write(theta, model)
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        value = loss(model, batch)
    value.backward()
    return layout.gradient(model), float(value.detach()), samples_of(batch)


def samples_of(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 1 if there is none."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.ndim), 1)


def _check_gradients(settings: Settings) -> None:
    if settings.sync_every is not None:
        raise ValueError(
            "the server expects changes of local steps, not gradients: train in a loop of your own with "
            'attach(model, optimizer, "local", server="host:port")'
        )


@dataclass
class WorkerStats:
    """Statistics of a worker.

    Attributes:
        submissions: number handed in; steps: batches computed; samples: in these batches.
        compute_seconds: spent in steps.
        version: of the last weights; losses: (seconds since its start, loss) of each submission's last batch.
    """

    submissions: int = 0
    steps: int = 0
    samples: int = 0
    compute_seconds: float = 0.0
    version: int = -1
    losses: list[tuple[float, float]] = field(default_factory=list)


class Worker:
    """One worker of a node.

    Args:
        model: trained in place; at the end it holds the server's final weights.
        leader: the node, if it runs in this process; else ``host:port`` of its leader.
        number: of this worker in its node.
        slowdown: emulates a slower machine: each step takes that many times as long, by sleeping.
        pace_seconds: emulates a machine with its own cores: each step takes at least this time, times slowdown.
        on_step: called with the seconds since the start and the loss.
        check: called before each attempt to reach the leader; may raise.
        gradient: (flat parameters, number of the batch) -> flat gradient (a new tensor each time), loss, samples; by
            default that of ``loss``.
        batches, loss: as for :func:`run`.
        trust: its node's.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        loss: Loss,
        leader: Node | str,
        number: int,
        *,
        slowdown: float = 1.0,
        pace_seconds: float = 0.0,
        on_step: Callable[[float, float], None] = lambda seconds, loss: None,
        check: Callable[[], object] = lambda: None,
        gradient: Callable[[Tensor, int], tuple[Tensor, float, int]] | None = None,
        trust: Trust = None,
    ) -> None:
        self.model, self._leader, self.number = model, leader, number
        self._slowdown, self._pace, self._on_step = slowdown, pace_seconds, on_step
        self._check = check if isinstance(leader, str) else lambda: leader.wait(0)
        check_number("slowdown", slowdown, least=1)
        self.layout = Layout.of(model)
        self._take = gradient or partial(local_gradient, model, self.layout, numbered(batches), loss)
        self.stats = WorkerStats()
        self._identity = PeerIdentity("worker", number, own_trust(trust or find_trust()))
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages, and at the end the reason as a string
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
        known, lease = False, 10.0
        while True:
            self._inbox = queue.SimpleQueue()
            try:
                leader, settings = find(self._reach, 6 * lease, min(0.5, lease / 4), known=known)
            except NotAdmitted as error:
                raise NodeRefused(f"worker {self.number}: {error}") from error
            except PairError as error:
                raise ServerLost(f"worker {self.number} can no longer reach its leader: {error}") from error
            known, lease = True, settings.lease_seconds
            if self._serve(leader, settings):
                return self.stats

    def _reach(self) -> tuple[Peer | LocalPeer, Settings]:
        self._check()
        if isinstance(self._leader, Node):
            settings = self._leader.settings
            _check_gradients(settings)
            self.layout.check(self._leader.layout)
            return self._leader.enter(self.number, self._inbox.put), settings
        caller = Caller(self._leader, self._identity)
        settings = Settings.from_json(caller.note("settings"))
        _check_gradients(settings)
        self.layout.check(Layout.from_json(caller.note("layout")))
        peer, most = caller.connect(encode(Enter(self.number))), most_bytes(settings, self.layout)
        put = self._inbox.put
        peer.start(CODEC, seconds=settings.lease_seconds, most_bytes=most, deliver=put, closed=put, beat=Ping())
        return peer, settings

    def _serve(self, leader: Peer | LocalPeer, settings: Settings) -> bool:
        """Serve one connection. Return True when training has ended."""
        last: Tensor | None = None
        averaged = settings.buffers == "average" and self.layout.buffers.numel > 0
        try:
            while True:
                message = self._inbox.get()
                if isinstance(message, str):
                    return False
                if isinstance(message, Stop):
                    self._stop(message, last)
                    return True
                if isinstance(message, Buffers):  # comes before the STOP
                    last = self.layout.buffers.read(message.tensor)
                if isinstance(message, Work):
                    result = self._compute(message)
                    if averaged:
                        leader.post(Buffers(0, self.layout.buffers.flat(self.model).cpu()))
                    leader.post(result)
        finally:
            # after an error too: the process may live on, and the leader would wait for a lease
            leader.finish()
            leader.join(2.0)

    def _stop(self, message: Stop, buffers: Tensor | None) -> None:
        if message.version < 0:
            self._check()
            raise ServerLost(f"worker {self.number}: its node has given up; the leader's output says why")
        if not self.stats.submissions:
            text = "worker %d arrived after training had ended, at version %d: it takes the last weights"
            logger.warning(text, self.number, message.version)
        if message.tensor is not None:
            self.layout.write(self.layout.read(message.tensor), self.model)
            self.stats.version = message.version
        if buffers is not None:
            self.layout.buffers.write(buffers, self.model)

    def _compute(self, message: Work) -> Result:
        if message.tensor is not None:
            self._theta = self.layout.read(message.tensor)
        assert self._theta is not None
        began = time.monotonic()
        self._last_samples = 0
        result = self._gradient(self._theta, message.step)
        took = time.monotonic() - began
        time.sleep(max(0.0, self._slowdown * max(took, self._pace) - took))
        seconds = time.monotonic() - began
        stats = self.stats
        stats.submissions += 1
        stats.steps += 1
        stats.samples += self._last_samples
        stats.compute_seconds += seconds
        stats.version = message.version
        stats.losses.append((time.monotonic() - self._began, self._last_loss))
        tensor = result if bool(result.isfinite().all()) else None
        return Result(message.token, self._last_samples, self._last_loss, seconds, tensor)

    def _gradient(self, theta: Tensor, batch: int) -> Tensor:
        flat, self._last_loss, samples = self._take(theta, batch)
        self._last_samples += samples
        self._on_step(time.monotonic() - self._began, self._last_loss)
        return flat.cpu()
