"""The leader of a node: sums what its workers hand in, reports iteration numbers, answers pulls. A state machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from thinwire.parameter_server.aggregate import Aggregator
from thinwire.parameter_server.effects import Effect, GiveUp, Join, Leave, Log, Report, Send, Start
from thinwire.parameter_server.messages import (
    REASONS,
    TAKEN,
    Bye,
    Fence,
    Grad,
    Hello,
    IterationNumber,
    Message,
    Nack,
    Pull,
    Refused,
    Row,
    Stop,
    Weights,
    Welcome,
)
from thinwire.parameter_server.settings import Settings
from thinwire.parameter_server.staleness import UNBOUNDED


class Leader:
    """One node's side of the protocol.

    It has no thread, clock or socket: ``join``, ``on``, ``done``, ``lost``, ``returned`` and ``tick`` are told what
    happened and when (seconds of any monotonic clock), and return what the driver has to do.

    Args:
        settings: the server's.
        node: number of the node.
        workers: W, the number of workers; they are numbered from 0.
        layout: hash of the parameters.
        instance: a number for this process, different from that of any other process with the same node number.

    Attributes:
        version: of the weights it holds; -1 before the first.
        counters: finished, dropped (not finite), stale (results that began before a WELCOME).
    """

    def __init__(self, settings: Settings, node: int, workers: int, *, layout: int = 0, instance: int = 0) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers!r} must be at least 1")
        self.settings, self.node, self.workers, self.layout = settings, node, workers, layout
        self.instance = instance
        self.alive = set(range(workers))
        self.counters: Counter[str] = Counter()
        self.running: dict[int, int] = {}
        self._tokens, self._joining = 0, False
        self._step_us = 0.0
        self._heard = self._reported = 0.0
        self.member = 0
        self._forget()

    def _forget(self, next_step: int = 0) -> None:
        """Reset everything that belongs to a membership."""
        settings = self.settings
        self.version, self.grant, self.allowed, self.floor = -1, 0, UNBOUNDED, -UNBOUNDED
        self.seq = self.in_total = self.started = self.acked = self._probe = 0
        self.loss_sum, self.samples, self.dropped = 0.0, 0, 0
        self.buffer = Aggregator(settings.alpha, settings.norm, settings.deterministic)
        self.computing: dict[int, int] = {}
        self.round: list[tuple[Row, Any]] = []
        self.made: Counter[int] = Counter()
        self.steps = settings.local_update.steps
        self.next_step = dict.fromkeys(range(self.workers), next_step)
        self._begun: dict[int, int] = {}

    # --- what workers may do ----------------------------------------------------------------------------------------

    def is_open(self, worker: int) -> bool:
        """Return whether the worker may start on the current weights, now or once it is idle."""
        fresh = self.version >= 0 and self.version >= self.floor
        return fresh and self.made[worker] < self.settings.starts_per_version and self.started <= self.allowed

    def low(self) -> int:
        """Return a lower bound on the base of every gradient not yet buffered: being computed, or yet to start."""
        bases = [*self.computing.values(), *(row.base for row, _ in self.round)]
        if any(self.is_open(worker) for worker in self.alive):
            bases.append(self.version)
        return min(bases, default=UNBOUNDED)

    def _may_start(self, worker: int) -> bool:
        if not self.is_open(worker) or worker in self.running:
            return False
        if self.settings.transfer == "push":  # at most W pushed sums may wait for the link, unanswered
            return self.in_total - self.acked + len(self.computing) < self.workers
        return len(self.buffer) + len(self.computing) < max(self.settings.buffer, self.workers)

    def _start(self) -> list[Effect]:
        """Start all workers that may start."""
        out: list[Effect] = []
        if self.settings.local == "sync":
            idle = not (self.computing or self.round or self.running.keys() & self.alive)
            room = len(self.buffer) + len(self.alive) <= max(self.settings.buffer, self.workers)
            if not (idle and room and all(self.is_open(worker) for worker in self.alive)):
                return out
        for worker in sorted(self.alive):
            if self._may_start(worker):
                self._tokens += 1
                step = self.next_step[worker]
                self.computing[worker], self.running[worker] = self.version, self._tokens
                self._begun[worker] = step
                self.next_step[worker] = step + 1
                self.made[worker] += 1
                self.started += 1
                out.append(Start(worker, self.version, step, self.steps, self._tokens))
        return out

    # --- events inside the node -------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Return the message that introduces this leader to the server."""
        return Hello(self.node, self.workers, self.layout, instance=self.instance)

    def join(self, now: float) -> list[Effect]:
        """Ask to become a member."""
        self._heard, self._joining = now, True
        return [Send(self.hello())]

    def done(
        self,
        worker: int,
        token: int,
        tensor: Any,
        now: float,
        *,
        samples: int = 1,
        loss: float = 0.0,
        finite: bool = True,
        seconds: float = 0.0,
    ) -> list[Effect]:
        """Take what a worker hands in for the ``Start`` with this ``token``.

        Args:
            tensor: flat; this leader may change it from now on.
            finite: whether it may be used; if not, it is dropped but still counted.
            seconds: of one step, for balancing the local steps.
        """
        if self.running.get(worker) != token:
            self.counters["stale"] += 1
            return []
        del self.running[worker]
        base = self.computing.pop(worker, None)
        if base is None:  # it began before the last WELCOME
            self.counters["stale"] += 1
            return self._start()
        self.counters["finished"] += 1
        if seconds:
            self._step_us = 1e6 * seconds if not self._step_us else 0.7 * self._step_us + 0.3e6 * seconds
        row = Row(base, worker, self._begun[worker], samples)
        if finite:
            self.loss_sum += loss
            self.samples += samples
        else:
            self.dropped += 1
            self.counters["dropped"] += 1
        if self.settings.transfer == "push":
            self.in_total += 1
            return [self._grad(0, 1.0, (row,) if finite else (), tensor if finite else None), *self._start()]
        if self.settings.local == "sync":
            if finite:
                self.round.append((row, tensor))
            return self._close_round()
        self.in_total += 1
        if finite:
            self.buffer.add(row, tensor)
        return [Report(), *self._start()]

    def _close_round(self) -> list[Effect]:
        """For ``local="sync"``: count the round as one submission once no worker is computing any more."""
        if self.computing:
            return []
        self.in_total += 1
        for row, tensor in self.round:
            self.buffer.add(row, tensor)
        self.round = []
        return [Report(), *self._start()]

    def lost(self, worker: int, now: float) -> list[Effect]:
        """Note that a worker has died. If it was the last one, the leader leaves."""
        self.alive.discard(worker)
        self.running.pop(worker, None)
        computed = self.computing.pop(worker, None) is not None
        self.started -= computed  # or SSP would wait for it forever
        if not self.member:
            return []
        if not self.alive:
            member, self.member = self.member, 0
            self._forget()
            return [Send(Bye(member)), Log("the last worker has gone", {"node": self.node})]
        if self.settings.local == "sync" and computed:
            return self._close_round()
        return [Report(), *self._start()]

    def returned(self, worker: int, now: float) -> list[Effect]:
        """Note that a worker is there (again).

        If the server may already assume that nothing more starts on these weights, the worker waits for the next ones.
        """
        if self.low() == UNBOUNDED:
            self.made[worker] = self.settings.starts_per_version
        self.alive.add(worker)
        self.running.pop(worker, None)
        self.started -= self.computing.pop(worker, None) is not None
        if self.member:
            return [Report(), *self._start()]
        return [] if self._joining else self.join(now)

    # --- messages -------------------------------------------------------------------------------------------------

    def report(self, now: float) -> IterationNumber:
        """Compose the IN for this moment. The driver sends it at once."""
        self.seq += 1
        self._reported = now
        return IterationNumber(
            self.member, self.seq, self.in_total, self.low(), self.buffer.low, self.grant,
            self.loss_sum, self.samples, self.dropped, int(self._step_us), len(self.alive), self._probe,
        )  # fmt: skip

    def _grad(self, pull: int, weight: float, rows: tuple[Row, ...], tensor: Any) -> Send:
        self.seq += 1
        return Send(Grad(self.member, pull, self.seq, self.in_total, self.low(), self.grant, weight, rows, tensor))

    def on(self, message: Message, now: float) -> list[Effect]:
        """Handle a message from the server."""
        if isinstance(message, Welcome):
            self._heard, self._joining = now, False
            self.member = message.member
            self._forget(message.next_step)
            return []
        if isinstance(message, Refused):
            return [] if self.member else [GiveUp(REASONS.get(message.reason, REASONS[TAKEN]).format(node=self.node))]
        if message.member != self.member or not self.member:  # type: ignore[union-attr]
            return []  # it belongs to an earlier membership
        self._heard = now
        if isinstance(message, Weights):
            self.version, self.grant, self.allowed = message.version, message.grant, message.allowed
            self.steps, self.acked = message.steps, message.ack
            self.made.clear()
            return [Report(), *self._start()]
        if isinstance(message, Pull):
            self._raise_floor(message.next_version)
            rows, weight, total = self.buffer.take(message.next_version - 1)
            return [self._grad(message.pull, weight, rows, total), *self._start()]
        if isinstance(message, Fence):
            self._raise_floor(message.next_version)
            self._probe = max(self._probe, message.probe)
            return [Report()]
        if isinstance(message, Stop):
            member, self.member = self.member, 0
            return [Send(Bye(member)), Leave(message.version)]
        if isinstance(message, Nack):
            return self.ended("the server had dropped this node", now)
        return []

    def _raise_floor(self, next_version: int) -> None:
        self.floor = max(self.floor, next_version - self.settings.bound)

    def ended(self, reason: str, now: float) -> list[Effect]:
        """End the membership after a broken connection or a silent server: start nothing more, and join again."""
        self.member = 0
        self._heard, self._joining = now, True
        self._forget()
        return [Join(reason)]

    def tick(self, now: float) -> list[Effect]:
        """Check the lease, and report when due. Called several times per lease."""
        lease = self.settings.lease_seconds
        if self.member and now - self._heard > lease:
            return self.ended(f"the server was silent for {lease:g} s", now)
        if self.member and now - self._reported >= lease / 3:
            return [Report()]
        return []

    def expect(self, seconds: float, now: float) -> None:
        """Note that a long message is on its way: the server counts as heard for that many seconds from now."""
        self._heard = max(self._heard, now + seconds)
