"""The same state machines in virtual time: thousands of nodes, links and faults in one process, without waiting."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from thinwire.core.checks import check_count
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.peer import SLOWEST
from thinwire.systems.parameter_server.effects import Apply, Effect, Join, Report, Send, Start
from thinwire.systems.parameter_server.journal import Journal, Update
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import Grad, Hello, Message, Piece, Weights
from thinwire.systems.parameter_server.outer import FlatWeights, Outer, default_outer
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import Assembly
from thinwire.systems.parameter_server.virtual_time import Card, VirtualChannel, VirtualTime
from thinwire.systems.parameter_server.worker import LocalWork

Ends = dict[tuple[str, int], Assembly]
"""The assemblies of one node's connections, by way ("up", "down") and member."""


class VirtualShards:
    """The shards of a simulation; to or from the server a message takes ``hop_seconds``. ``sizes``: with frames."""

    def __init__(self, count: int, settings: Settings, link: Link, payload_bytes: int) -> None:
        check_count("shards", count, 0)
        self._settings = settings
        self.cards = [(Card(link.bits_per_second), Card(link.bits_per_second)) for _ in range(count)]
        ends = [payload_bytes * i // max(count, 1) for i in range(count + 1)]
        self.sizes = [FRAME.size + end - first for first, end in pairwise(ends)]
        self.hop_seconds = link.latency_seconds
        self._seconds = settings.lease_seconds + payload_bytes / SLOWEST

    def __len__(self) -> int:
        return len(self.cards)

    def take(
        self, ends: Ends, way: str, message: Message | Piece, shard: int, now: float
    ) -> tuple[list[Any], Assembly]:
        """Return the messages that are complete and next in order, after this message or piece has come to one end."""
        key = way, getattr(message, "member", 0)
        if key not in ends:
            ends[key] = Assembly(len(self), self._settings.channels == 1)
        if isinstance(message, Piece):
            ready = ends[key].piece(message.number, shard, None, now)
        else:
            ready = ends[key].message(message, number_of(message), self._seconds, now)
        return [message for message, _ in ready], ends[key]


def number_of(message: Message) -> int | None:
    """Return the number of a message's pieces; None: it carries no tensor."""
    if isinstance(message, Weights) and not message.same:
        return message.grant
    return message.seq if isinstance(message, Grad) and message.rows else None


@dataclass(frozen=True)
class Link:
    """A node's link to the server.

    Attributes:
        latency_seconds: one way.
        bits_per_second: of the node's network card, in each direction; None: no limit.
        jitter: draws how many seconds a message takes longer.
    """

    latency_seconds: float = 0.0005
    bits_per_second: float | None = None
    jitter: Callable[[random.Random], float] | None = None


@dataclass(frozen=True)
class Fault:
    """Something that happens to a node.

    Attributes:
        at_seconds: when.
        kind: "kill" (the leader, or one ``worker``), "return" (after a kill), "pause" (for ``for_seconds``), or "cut"
            (the connection).
    """

    at_seconds: float
    kind: str
    node: int
    worker: int | None = None
    for_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("kill", "return", "pause", "cut"):
            raise ValueError(f'kind={self.kind!r} is unknown; use "kill", "return", "pause" or "cut"')


@dataclass
class Trace:
    """The result of a simulation.

    Attributes:
        seconds: virtual time at the end.
        updates: (version, at seconds, [(node, worker, step, base)]).
        parameters: the final weights; None without tensors.
        bytes_up, bytes_down: to and from the server, including frames.
        messages: how many, by kind.
        counters: the server's.
        finished: submissions that workers have completed.
        journal: see :mod:`journal`.
        losses: (at seconds, value) as returned by ``evaluate``.
    """

    seconds: float = 0.0
    updates: list[tuple[int, float, list[tuple[int, int, int, int]]]] = field(default_factory=list)
    parameters: Tensor | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    journal: Journal | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def gradients(self) -> int:
        """Number of applied gradients."""
        return sum(len(rows) for _, _, rows in self.updates)

    @property
    def bytes_per_gradient(self) -> float:
        """Bytes up and down per applied gradient."""
        return (self.bytes_up + self.bytes_down) / max(1, self.gradients)

    def staleness(self) -> Counter[int]:
        """Count the applied gradients by their age in versions."""
        return Counter(version - base for version, _, rows in self.updates for *_, base in rows)


_LINK = Link()  # an immutable default

StepSeconds = Callable[[int, int, int, random.Random], float]
GradientOf = Callable[[Tensor, int, int, int], Tensor]


class _Node:
    def __init__(self, sim: _Simulation, number: int, link: Link) -> None:
        self.number = number
        self.cards = (Card(link.bits_per_second), Card(link.bits_per_second))
        self.link = link
        self.paused_until = 0.0
        self.alive = True
        self.theta: Tensor | None = None
        self.work: dict[int, LocalWork] = {}
        self.leader = Leader(sim.settings, number, sim.workers)
        self.wires: dict[tuple[str, str], _Wire] = {}
        self.connect(sim)

    def connect(self, sim: _Simulation) -> None:
        """Open new channels; what was on the old ones is lost."""
        for wire in self.wires.values():
            wire.channel.open = False
        jitter = self.link.jitter
        draw = None if jitter is None else (lambda: jitter(sim.random))
        up, down = self.cards
        self.wires = {}
        for way, source, target in (("up", up, sim.cards[0]), ("down", sim.cards[1], down)):
            control = VirtualChannel(sim.time, source, target, self.link.latency_seconds, draw)
            self.wires[way, "control"] = _Wire(control)
            if sim.settings.channels == 2:
                data = VirtualChannel(sim.time, source, target, self.link.latency_seconds, draw, behind=control)
                self.wires[way, "data"] = _Wire(data, behind=self.wires[way, "control"])
        for index, (to, come_from) in enumerate(sim.shards.cards):
            for way, source, target in (("up", up, to), ("down", come_from, down)):
                channel = VirtualChannel(sim.time, source, target, self.link.latency_seconds, draw)
                self.wires[way, f"shard {index}"] = _Wire(channel, index)
        self.ends: Ends = {}


class _Wire:
    """A channel of the server (-1) or a shard, and its queue, whose messages wait for earlier ones of ``behind``."""

    def __init__(self, channel: VirtualChannel, shard: int = -1, behind: _Wire | None = None) -> None:
        self.channel, self.shard, self.behind = channel, shard, behind
        self.queue: deque[tuple[Message | Piece, int, int]] = deque()  # last: how many control messages it waits for
        self.queued = self.sent = 0
        self.busy = self.due = False

    @property
    def waits(self) -> bool:
        return self.busy or (self.behind is not None and bool(self.queue) and self.behind.sent < self.queue[0][2])


class _Simulation:
    def __init__(
        self, settings: Settings, nodes: int, workers: int, link: Link | Callable[[int], Link], server_link: Link,
        step_seconds: StepSeconds, parameters: Tensor | None, gradient: GradientOf | None, outer: Outer | None,
        seed: int, payload_bytes: int, apply_seconds: float, shards: int,
    ) -> None:  # fmt: skip
        self.settings, self.workers = settings, workers
        self.random = random.Random(seed)
        self.time = VirtualTime()
        self.server = Server(settings)
        self.cards = (Card(server_link.bits_per_second), Card(server_link.bits_per_second))
        self.step_seconds, self.gradient = step_seconds, gradient
        self.shards = VirtualShards(shards, settings, server_link, payload_bytes)
        self.payload, self.apply_seconds = payload_bytes, apply_seconds + 2 * self.shards.hop_seconds * bool(shards)
        self.trace = Trace()
        self.lines: list[Update] = []
        self.member_node: dict[int, int] = {}
        outer = outer or default_outer(settings, nodes)
        self.weights = None if parameters is None else FlatWeights(parameters, outer, settings, nodes * workers)
        self.nodes = [_Node(self, n, link(n) if callable(link) else link) for n in range(nodes)]

    def begin(self) -> None:
        for node in self.nodes:
            self.leader(node, node.leader.join(0.0))
        self.heartbeat()

    def heartbeat(self) -> None:
        self.server_does(self.server.tick(self.time.now))
        for node in self.nodes:
            if node.alive and self.time.now >= node.paused_until:
                self.leader(node, node.leader.tick(self.time.now))
        self.time.after(self.settings.lease_seconds / 10, self.heartbeat)

    def server_does(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                member = self.server.members.get(effect.member)
                if member is not None:
                    self.member_node[effect.member] = member.node
                node = self.nodes[self.member_node[effect.member]]
                message = effect.message
                if isinstance(message, Weights) and not message.same:
                    message = replace(message, tensor=None if self.weights is None else self.weights.snapshot)
                self.send(node, "down", message)
            elif isinstance(effect, Apply):
                rows = [(p.node, r.worker, r.step, r.base) for p in effect.contributions for r in p.rows]
                self.trace.updates.append((effect.version, self.time.now, rows))
                self.lines.append(Update.of(effect, self.time.now))
                self.time.after(self.apply_seconds, lambda effect=effect: self.apply(effect))  # type: ignore[misc]

    def apply(self, effect: Apply) -> None:
        if self.weights is not None:
            self.weights.apply(effect.contributions)
        self.server_does(self.server.applied(self.time.now))

    def leader(self, node: _Node, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if self.shards and isinstance(effect.message, Hello):
                    node.connect(self)  # each membership has its own connections to the shards
                self.send(node, "up", effect.message)
            elif isinstance(effect, Report):
                node.wires["up", "control"].due = True
                self.pump(node, "up", "control")
            elif isinstance(effect, Start):
                self.start(node, effect)
            elif isinstance(effect, Join):
                node.connect(self)
                self.leader(node, node.leader.join(self.time.now))

    def send(self, node: _Node, way: str, message: Message) -> None:
        size, number = FRAME.size + 32 * len(getattr(message, "rows", ())), number_of(message)
        full = number is not None and not self.shards
        if number is not None and self.shards:
            wires, member = node.wires, message.member  # type: ignore[union-attr]

            def pieces() -> None:
                for index, piece_size in enumerate(self.shards.sizes if node.wires is wires else ()):
                    self.queue(node, way, f"shard {index}", Piece(member, number), piece_size)

            self.time.after(self.shards.hop_seconds if way == "down" else 0.0, pieces)  # down: the server tells them
        name = "data" if full and self.settings.channels == 2 else "control"
        self.queue(node, way, name, message, size + self.payload * full)

    def queue(self, node: _Node, way: str, name: str, message: Message | Piece, size: int) -> None:
        wire = node.wires[way, name]
        wire.queue.append((message, size, 0 if wire.behind is None else wire.behind.queued))
        wire.queued += 1
        self.pump(node, way, name)

    def pump(self, node: _Node, way: str, name: str) -> None:
        """Give the next message to the channel when its end is free; a report only if nothing else waits."""
        wire = node.wires[way, name]
        if wire.waits:
            return
        if wire.queue:
            message, size, _ = wire.queue.popleft()
            wire.sent += 1
        elif wire.due:
            wire.due = False
            message, size = node.leader.report(self.time.now), FRAME.size
            if not message.member:
                return
        else:
            return
        wire.busy = True
        self.trace.messages[type(message).__name__] += 1
        if way == "up":
            self.trace.bytes_up += size
        else:
            self.trace.bytes_down += size

        def sent() -> None:
            wire.busy = False
            if node.wires.get((way, name)) is wire:
                self.pump(node, way, name)

        if size > FRAME.size + 32 * len(getattr(message, "rows", ())) and not isinstance(message, Piece):
            # the frame of a tensor arrives before it, so the receiver does not think that the sender is dead
            allowed = self.settings.lease_seconds + size / SLOWEST
            self.time.after(node.link.latency_seconds, lambda: self.expect(node, way, allowed))
        wire.channel.send(size, lambda: self.deliver(node, way, message, wire.shard), sent)
        if name == "control" and (way, "data") in node.wires:
            self.pump(node, way, "data")

    def expect(self, node: _Node, way: str, seconds: float) -> None:
        if way == "up":
            self.server.expect(node.leader.member, seconds, self.time.now)
        else:
            node.leader.expect(seconds, self.time.now)

    def deliver(
        self, node: _Node, way: str, message: Message | Piece, shard: int = -1, ends: Ends | None = None
    ) -> None:
        """Deliver a message from a wire of a shard or (-1) the server. ``ends``: those of the connection it used."""
        ends = node.ends if ends is None else ends
        if way == "down" and not node.alive:
            return
        if way == "down" and self.time.now < node.paused_until:
            self.time.after(node.paused_until - self.time.now, lambda: self.deliver(node, way, message, shard, ends))
        elif not self.shards:
            self.take(node, way, message)  # type: ignore[arg-type]
        elif way == "up" and shard >= 0:  # the shard tells the server
            self.time.after(self.shards.hop_seconds, lambda: self.assemble(node, way, message, shard, ends))
        else:
            self.assemble(node, way, message, shard, ends)

    def assemble(self, node: _Node, way: str, message: Message | Piece, shard: int, ends: Ends) -> None:
        if ends is not node.ends:
            return  # it belongs to a connection that no longer exists
        ready, assembly = self.shards.take(ends, way, message, shard, self.time.now)
        if assembly.until is not None:
            self.expect(node, way, assembly.until - self.time.now)
        for whole in ready:
            self.take(node, way, whole)

    def take(self, node: _Node, way: str, message: Message) -> None:
        if way == "up":
            self.server_does(self.server.on(message, self.time.now))
            return
        if isinstance(message, Weights) and not message.same:
            node.theta = message.tensor
        self.leader(node, node.leader.on(message, self.time.now))

    def start(self, node: _Node, start: Start) -> None:
        seconds = sum(
            self.step_seconds(node.number, start.worker, start.step + i, self.random) for i in range(start.steps)
        )
        tensor: Any = None
        if self.gradient is not None and node.theta is not None:
            gradient, number, worker = self.gradient, node.number, start.worker
            work = node.work.setdefault(worker, LocalWork(self.settings.local_update))
            tensor = work.submission(node.theta, start.step, start.steps, lambda x, i: gradient(x, number, worker, i))
        leader = node.leader

        def done() -> None:
            if node.leader is not leader or not node.alive or start.worker not in leader.alive:
                return
            if self.time.now < node.paused_until:
                self.time.after(node.paused_until - self.time.now, done)
                return
            finite = tensor is None or bool(tensor.isfinite().all())
            self.trace.finished += leader.running.get(start.worker) == start.token
            self.leader(
                node,
                leader.done(
                    start.worker, start.token, tensor, self.time.now, finite=finite, seconds=seconds / start.steps
                ),
            )

        self.time.after(seconds, done)

    def fault(self, fault: Fault) -> None:
        node, now = self.nodes[fault.node], self.time.now
        if fault.kind == "pause":
            node.paused_until = now + fault.for_seconds
        elif fault.worker is not None:
            change = node.leader.lost if fault.kind == "kill" else node.leader.returned
            self.leader(node, change(fault.worker, now))
        elif fault.kind == "kill":
            node.alive = False
            member = node.leader.member
            node.connect(self)
            if member:
                self.server_does(self.server.gone(member, now))
        elif fault.kind == "cut":
            member = node.leader.member
            self.leader(node, node.leader.ended("the connection broke", now))
            if member:
                self.server_does(self.server.gone(member, now))
        else:
            node.alive, node.theta, node.work = True, None, {}
            node.leader = Leader(self.settings, node.number, self.workers)
            node.connect(self)
            self.leader(node, node.leader.join(now))


def simulate(
    settings: Settings,
    *,
    nodes: int,
    workers: int = 1,
    updates: int | None = None,
    gradients: int | None = None,
    seconds: float | None = None,
    step_seconds: StepSeconds,
    link: Link | Callable[[int], Link] = _LINK,
    server_link: Link = _LINK,
    parameters: Tensor | None = None,
    gradient: GradientOf | None = None,
    outer: Outer | None = None,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    payload_bytes: int | None = None,
    apply_seconds: float = 0.0,
    shards: int = 0,
    evaluate: Callable[[Tensor], float] | None = None,
    evaluate_seconds: float = 1.0,
) -> Trace:
    """Run server and leaders in virtual time, for a number of updates, applied gradients or virtual seconds.

    Args:
        nodes, workers: P leaders with W workers each.
        step_seconds: (node, worker, step, random) -> seconds of one step.
        link: of each node, or a function node -> link.
        server_link: the server's, shared by all nodes.
        parameters, gradient: weights ``[D]`` and (weights, node, worker, batch) -> gradient; without them only the
            protocol runs.
        outer: makes the server's optimizer; by default that of the settings.
        payload_bytes: of one tensor as sent; by default that of ``parameters``.
        apply_seconds: the time the server takes for an update.
        shards: k machines, each with a link like the server's and a slice of the weights; 0: the server holds them.
        evaluate: weights -> loss, called every ``evaluate_seconds`` of virtual time.

    """
    if updates is None and gradients is None and seconds is None:
        raise ValueError("say when to end: updates, gradients or seconds")
    check_count("nodes", nodes)
    check_count("workers", workers)
    if payload_bytes is None:
        payload_bytes = 0 if parameters is None else parameters.numel() * parameters.element_size()
    sim = _Simulation(
        settings, nodes, workers, link, server_link, step_seconds, parameters, gradient, outer,
        seed, payload_bytes, apply_seconds, shards,
    )  # fmt: skip
    for fault in faults:
        sim.time.after(fault.at_seconds, lambda fault=fault: sim.fault(fault))  # type: ignore[misc]
    if evaluate is not None and sim.weights is not None:
        weights = sim.weights

        def look() -> None:
            sim.trace.losses.append((sim.time.now, evaluate(weights.theta)))
            sim.time.after(evaluate_seconds, look)

        sim.time.after(0.0, look)
    sim.begin()
    last_fault = max((fault.at_seconds for fault in faults), default=0.0)

    def reached() -> bool:
        server = sim.server
        if not any(node.alive for node in sim.nodes) and sim.time.now > last_fault:
            return True  # nothing more can happen
        return (updates is not None and server.version >= updates) or (
            gradients is not None and server.counters["applied"] >= gradients
        )

    sim.time.run(reached, float("inf") if seconds is None else seconds)
    trace = sim.trace
    trace.updates = trace.updates[: sim.server.version]
    trace.seconds = sim.time.now
    trace.counters = sim.server.counters
    trace.parameters = None if sim.weights is None else sim.weights.theta.clone()
    trace.journal = Journal(settings, {"seed": seed, "nodes": nodes}, tuple(sim.lines[: sim.server.version]))
    return trace
