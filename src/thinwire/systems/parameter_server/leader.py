"""The leader of a node: sums what its workers hand in, reports iteration numbers, answers pulls. A state machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.checks import check_count
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.effects import Effect, GiveUp, Join, Leave, Report, Send, Start
from thinwire.systems.parameter_server.settings import UNBOUNDED, Settings, alpha


class Aggregator:
    """Gradients waiting to be pulled (None: without tensors); ``deterministic``: added in fp64, by (worker, step)."""

    def __init__(self, alpha_rule: str, deterministic: bool = False) -> None:
        self._alpha, self._deterministic = alpha_rule, deterministic
        self._rows: list[msg.Row] = []
        self._sums: dict[int, Any] = {}
        self._each: list[tuple[msg.Row, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def low(self) -> int:
        return min((row.base for row in self._rows), default=UNBOUNDED)

    def add(self, row: msg.Row, tensor: Any) -> None:
        """Add one gradient. The aggregator may change the tensor from now on."""
        self._rows.append(row)
        if self._deterministic:
            self._each.append((row, tensor))
        elif tensor is not None:
            held = self._sums.get(row.base)
            self._sums[row.base] = tensor if held is None else held.add_(tensor)

    def take(self, now: int) -> tuple[tuple[msg.Row, ...], Any]:
        """Empty it for an update of version ``now``: rows, and the sum of alpha * gradient."""
        rows = tuple(sorted(self._rows, key=lambda row: (row.worker, row.step)))
        if self._deterministic:
            parts = [(row.base, tensor) for row, tensor in sorted(self._each, key=lambda e: (e[0].worker, e[0].step))]
            total = _total([(alpha(self._alpha, now - base), t) for base, t in parts if t is not None], wide=True)
        else:
            total = _total([(alpha(self._alpha, now - base), t) for base, t in sorted(self._sums.items())], wide=False)
        self._rows, self._sums, self._each = [], {}, []
        return rows, total


def _total(parts: list[tuple[float, Any]], wide: bool) -> Any:
    """Return the sum of scaled tensors in order, in fp64 if ``wide``; a single one of scale 1 as it is."""
    if not parts:
        return None
    scale, first = parts[0]
    total = first.double() if wide else first
    if scale != 1.0:
        total = total * scale
    for scale, tensor in parts[1:]:
        total = total.add_(tensor, alpha=scale) if not wide else total + tensor.double() * scale
    return total


@dataclass
class Membership:
    """From a WELCOME until the leader leaves, is dropped, or loses the server; then a new one is made.

    ``number`` 0: not a member. ``version``: of the weights held (-1: none), sent as ``grant``. ``allowed``: the last
    permitted start (SSP). ``floor``: the oldest version to start on. ``probe``: to be echoed. ``in_total``: submitted,
    of which the server has ``acked``. ``computing``: base of each busy worker, ``begun`` its step. ``made``: starts of
    each worker on these weights.
    """

    settings: Settings
    next_step: dict[int, int]
    number: int = 0
    version: int = -1
    grant: int = 0
    allowed: int = UNBOUNDED
    floor: int = -UNBOUNDED
    seq: int = 0
    probe: int = 0
    in_total: int = 0
    acked: int = 0
    started: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    dropped: int = 0
    steps: int = 0
    computing: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    made: Counter[int] = field(default_factory=Counter)
    buffer: Aggregator = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.buffer = Aggregator(settings.alpha, settings.deterministic)
        self.steps = settings.steps

    def is_open(self, worker: int) -> bool:
        """Return whether the worker may start on the current weights, now or once it is idle."""
        fresh = self.version >= 0 and self.version >= self.floor
        return fresh and self.made[worker] < self.settings.starts_per_version and self.started <= self.allowed

    def has_room(self, workers: int) -> bool:
        if self.settings.transfer == "push":  # at most as many pushed sums may wait for the link, unanswered
            return self.in_total - self.acked + len(self.computing) < workers
        return len(self.buffer) + len(self.computing) < max(self.settings.buffer, workers)

    def low(self, alive: Collection[int]) -> int:
        """Return a lower bound on the base of every gradient not yet buffered: being computed, or yet to start."""
        bases = list(self.computing.values())
        if any(self.is_open(worker) for worker in alive):
            bases.append(self.version)
        return min(bases, default=UNBOUNDED)

    def start(self, worker: int) -> int:
        step = self.next_step[worker]
        self.computing[worker], self.begun[worker] = self.version, step
        self.next_step[worker] = step + 1
        self.made[worker] += 1
        self.started += 1
        return step

    def lost(self, worker: int) -> None:
        """Note that what a worker computes will not come, or SSP would wait for it."""
        self.started -= self.computing.pop(worker, None) is not None

    def raise_floor(self, next_version: int) -> None:
        """Note the version of the next update: results on too old weights would miss the bound."""
        self.floor = max(self.floor, next_version - self.settings.bound)

    def report(self, alive: Collection[int], step_us: float) -> msg.IterationNumber:
        self.seq += 1
        return msg.IterationNumber(
            self.number, self.seq, self.in_total, self.low(alive), self.buffer.low, self.grant,
            self.loss_sum, self.samples, self.dropped, int(step_us), len(alive), self.probe,
        )  # fmt: skip

    def grad(self, alive: Collection[int], pull: int, rows: tuple[msg.Row, ...], tensor: Any) -> msg.Grad:
        self.seq += 1
        return msg.Grad(self.number, pull, self.seq, self.in_total, self.low(alive), self.grant, rows, tensor)


class Leader:
    """One node's side of the protocol, without thread, clock or socket.

    It is told what happened and when (seconds of any monotonic clock), and returns what the driver has to do.
    ``instance``: tells processes with the same node number apart. ``running``: token of what each worker computes, in
    whatever membership that began. ``counters``: finished, dropped (not finite), stale (begun before a WELCOME).
    """

    def __init__(self, settings: Settings, node: int, workers: int, *, layout: int = 0, instance: int = 0) -> None:
        self.settings, self.node, self.workers, self.layout = settings, node, check_count("workers", workers), layout
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
        return self._membership.number

    @property
    def version(self) -> int:
        return self._membership.version

    def _start(self) -> list[Effect]:
        out: list[Effect] = []
        own = self._membership
        for worker in sorted(self.alive):
            if own.is_open(worker) and worker not in self.running and own.has_room(self.workers):
                self._tokens += 1
                self.running[worker] = self._tokens
                step = own.start(worker)
                out.append(Start(worker, own.version, step, own.steps, self._tokens))
        return out

    def hello(self) -> msg.Hello:
        return msg.Hello(self.node, self.workers, self.layout, instance=self.instance)

    def join(self, now: float) -> list[Effect]:
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
        """Take the result of a ``Start``; ``tensor`` may be changed. If not ``finite``, it is dropped but counted."""
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
        row = msg.Row(base, worker, own.begun[worker], samples)
        if finite:
            own.loss_sum += loss
            own.samples += samples
        else:
            own.dropped += 1
            self.counters["dropped"] += 1
        if self.settings.transfer == "push":
            own.in_total += 1
            grad = own.grad(self.alive, 0, (row,) if finite else (), tensor if finite else None)
            return [Send(grad), *self._start()]
        own.in_total += 1
        if finite:
            own.buffer.add(row, tensor)
        return [Report(), *self._start()]

    def lost(self, worker: int, now: float) -> list[Effect]:
        """Note that a worker has died. If it was the last one, the leader leaves."""
        self.alive.discard(worker)
        self.running.pop(worker, None)
        self._membership.lost(worker)
        member = self.member
        if not member:
            return []
        if not self.alive:
            self._membership = self._new()
            return [Send(msg.Bye(member))]
        return [Report(), *self._start()]

    def returned(self, worker: int, now: float) -> list[Effect]:
        """Let a worker in. If the server may assume that nothing more starts on these weights, it waits."""
        if self._membership.low(self.alive) == UNBOUNDED:
            self._membership.made[worker] = self.settings.starts_per_version
        self.alive.add(worker)
        self.running.pop(worker, None)
        self._membership.lost(worker)
        if self.member:
            return [Report(), *self._start()]
        return [] if self._joining else self.join(now)

    def report(self, now: float) -> msg.IterationNumber:
        """Compose the IN for this moment. The driver sends it at once."""
        self._reported = now
        return self._membership.report(self.alive, self._step_us)

    def on(self, message: msg.Message, now: float) -> list[Effect]:
        own = self._membership
        if isinstance(message, msg.Welcome):
            self._heard, self._joining = now, False
            if not self.alive:  # the last worker has gone meanwhile: whoever comes next joins again
                return [Send(msg.Bye(message.member))]
            self._membership = self._new(message.member, message.next_step)
            return []
        if isinstance(message, msg.Refused):
            reason = msg.REASONS.get(message.reason, msg.REASONS[msg.TAKEN])
            return [] if own.number else [GiveUp(reason.format(node=self.node))]
        if message.member != own.number or not own.number:  # type: ignore[union-attr]
            return []  # it belongs to an earlier membership
        self._heard = now
        if isinstance(message, msg.Weights):
            own.version, own.grant, own.allowed = message.version, message.grant, message.allowed
            own.steps, own.acked = message.steps, message.ack
            own.made.clear()
            return [Report(), *self._start()]
        if isinstance(message, msg.Pull):
            own.raise_floor(message.next_version)
            rows, total = own.buffer.take(message.next_version - 1)
            return [Send(own.grad(self.alive, message.pull, rows, total)), *self._start()]
        if isinstance(message, msg.Fence):
            own.raise_floor(message.next_version)
            own.probe = max(own.probe, message.probe)
            return [Report()]
        if isinstance(message, msg.Stop):
            own.number = 0
            return [Send(msg.Bye(message.member)), Leave(message.version)]
        if isinstance(message, msg.Nack):
            return self.ended("the server had dropped this node", now)
        return []

    def ended(self, reason: str, now: float) -> list[Effect]:
        """End the membership after a broken connection or a silent server, and join again if there is a worker.

        Without one the server would take the node for done with its weights, and a worker that comes then would wait
        for the next ones, which may depend on it.
        """
        was_member = bool(self.member)
        self._heard, self._joining = now, bool(self.alive)
        self._membership = self._new()
        return [Join(reason if was_member else "")] if self.alive else []

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
