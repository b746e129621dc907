"""The leader of a node: sums what its workers hand in, reports iteration numbers, answers pulls. A state machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from thinwire.systems.parameter_server.effects import Effect, GiveUp, Join, Leave, Log, Report, Send, Start
from thinwire.systems.parameter_server.membership import Membership
from thinwire.systems.parameter_server.messages import (
    REASONS,
    TAKEN,
    Bye,
    Fence,
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
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import UNBOUNDED


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
        alive: its living workers; running: token of what each computes, in whatever membership that began.
        counters: finished, dropped (not finite), stale (results that began before a WELCOME).
    """

    def __init__(self, settings: Settings, node: int, workers: int, *, layout: int = 0, instance: int = 0) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers!r} must be at least 1")
        self.settings, self.node, self.workers, self.layout = settings, node, workers, layout
        self.instance = instance
        self.alive = set(range(workers))
        self.running: dict[int, int] = {}
        self.counters: Counter[str] = Counter()
        self._tokens, self._joining = 0, False
        self._step_us = 0.0
        self._heard = self._reported = 0.0
        self._membership = self._new()

    def _new(self, member: int = 0, next_step: int = 0) -> Membership:
        return Membership(self.settings, dict.fromkeys(range(self.workers), next_step), member)

    @property
    def member(self) -> int:
        """Number of the membership; 0: none."""
        return self._membership.number

    @property
    def version(self) -> int:
        """Version of the weights it holds; -1 before the first."""
        return self._membership.version

    # --- what workers may do ----------------------------------------------------------------------------------------

    def _start(self) -> list[Effect]:
        """Start all workers that may start."""
        out: list[Effect] = []
        own = self._membership
        if self.settings.local == "sync":
            idle = not (own.computing or own.round or self.running.keys() & self.alive)
            room = len(own.buffer) + len(self.alive) <= max(self.settings.buffer, self.workers)
            if not (idle and room and all(own.is_open(worker) for worker in self.alive)):
                return out
        for worker in sorted(self.alive):
            if own.is_open(worker) and worker not in self.running and own.has_room(self.workers):
                self._tokens += 1
                self.running[worker] = self._tokens
                step = own.start(worker)
                out.append(Start(worker, own.version, step, own.steps, self._tokens))
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
        own = self._membership
        base = own.computing.pop(worker, None)
        if base is None:  # it began before the last WELCOME
            self.counters["stale"] += 1
            return self._start()
        self.counters["finished"] += 1
        if seconds:
            self._step_us = 1e6 * seconds if not self._step_us else 0.7 * self._step_us + 0.3e6 * seconds
        row = Row(base, worker, own.begun[worker], samples)
        if finite:
            own.loss_sum += loss
            own.samples += samples
        else:
            own.dropped += 1
            self.counters["dropped"] += 1
        if self.settings.transfer == "push":
            own.in_total += 1
            return [self._grad(0, 1.0, (row,) if finite else (), tensor if finite else None), *self._start()]
        if self.settings.local == "sync":
            if finite:
                own.round.append((row, tensor))
            return self._close_round()
        own.in_total += 1
        if finite:
            own.buffer.add(row, tensor)
        return [Report(), *self._start()]

    def _close_round(self) -> list[Effect]:
        """For ``local="sync"``: count the round as one submission once no worker is computing any more."""
        own = self._membership
        if own.computing:
            return []
        own.in_total += 1
        for row, tensor in own.round:
            own.buffer.add(row, tensor)
        own.round = []
        return [Report(), *self._start()]

    def lost(self, worker: int, now: float) -> list[Effect]:
        """Note that a worker has died. If it was the last one, the leader leaves."""
        self.alive.discard(worker)
        self.running.pop(worker, None)
        computed, member = self._membership.lost(worker), self.member
        if not member:
            return []
        if not self.alive:
            self._membership = self._new()
            return [Send(Bye(member)), Log("the last worker has gone", {"node": self.node})]
        if self.settings.local == "sync" and computed:
            return self._close_round()
        return [Report(), *self._start()]

    def returned(self, worker: int, now: float) -> list[Effect]:
        """Note that a worker is there (again).

        If the server may already assume that nothing more starts on these weights, the worker waits for the next ones.
        """
        if self._membership.low(self.alive) == UNBOUNDED:
            self._membership.made[worker] = self.settings.starts_per_version
        self.alive.add(worker)
        self.running.pop(worker, None)
        self._membership.lost(worker)
        if self.member:
            return [Report(), *self._start()]
        return [] if self._joining else self.join(now)

    # --- messages -------------------------------------------------------------------------------------------------

    def report(self, now: float) -> IterationNumber:
        """Compose the IN for this moment. The driver sends it at once."""
        self._reported = now
        return self._membership.report(self.alive, self._step_us)

    def _grad(self, pull: int, weight: float, rows: tuple[Row, ...], tensor: Any) -> Send:
        return Send(self._membership.grad(self.alive, pull, weight, rows, tensor))

    def on(self, message: Message, now: float) -> list[Effect]:
        """Handle a message from the server."""
        own = self._membership
        if isinstance(message, Welcome):
            self._heard, self._joining = now, False
            self._membership = self._new(message.member, message.next_step)
            return []
        if isinstance(message, Refused):
            return [] if own.number else [GiveUp(REASONS.get(message.reason, REASONS[TAKEN]).format(node=self.node))]
        if message.member != own.number or not own.number:  # type: ignore[union-attr]
            return []  # it belongs to an earlier membership
        self._heard = now
        if isinstance(message, Weights):
            own.take_weights(message)
            return [Report(), *self._start()]
        if isinstance(message, Pull):
            own.raise_floor(message.next_version)
            rows, weight, total = own.buffer.take(message.next_version - 1)
            return [self._grad(message.pull, weight, rows, total), *self._start()]
        if isinstance(message, Fence):
            own.raise_floor(message.next_version)
            own.probe = max(own.probe, message.probe)
            return [Report()]
        if isinstance(message, Stop):
            own.number = 0
            return [Send(Bye(message.member)), Leave(message.version)]
        if isinstance(message, Nack):
            return self.ended("the server had dropped this node", now)
        return []

    def ended(self, reason: str, now: float) -> list[Effect]:
        """End the membership after a broken connection or a silent server: start nothing more, and join again."""
        was_member = bool(self.member)
        self._heard, self._joining = now, True
        self._membership = self._new()
        return [Join(reason if was_member else "")]

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
