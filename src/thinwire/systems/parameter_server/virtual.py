"""The same processes in virtual time: thousands of nodes, links and faults in one of them, without waiting.

Server, shards and nodes are those that run on machines, line by line; only their clock, their connections and the work
of their workers are simulated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_count, check_number
from thinwire.core.virtual_time import Line, VirtualTime
from thinwire.systems.link.actor import Actor
from thinwire.systems.link.codec import FRAME, ROW_BYTES
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.peer import LocalPeer, allowance
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import ServerEnd
from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.journal import Journal, LocalWork, Update
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.node import NodeDriver, Uplink, WorkerPlace
from thinwire.systems.parameter_server.outer import FlatWeights, LocalWeights, Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.service import ServerDriver
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard import ShardDriver, WeightSlice
from thinwire.systems.parameter_server.shards import ShardedWeights


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
_UNMOVED_SECONDS = 1e5  # without an update, after which a simulation without an end of its own gives up

StepSeconds = Callable[[int, int, int, random.Random], float]
GradientOf = Callable[[Tensor, int, int, int], Tensor]


class Card(Line):
    """A network card: sends (or receives) one message after another; ``bits_per_second`` None: no limit."""

    def __init__(self, bits_per_second: float | None) -> None:
        super().__init__()
        if bits_per_second is not None:
            check_number("bits_per_second", bits_per_second, above=0)
        self._rate, self.bytes = bits_per_second, 0

    def pass_on(self, ready: float, size: int) -> float:
        self.bytes += size
        return ready if self._rate is None else self.carry(ready, 8.0 * size / self._rate)


class VirtualChannel:
    """Messages in order from one card to another; ``jitter``: extra seconds, which let none overtake.

    ``small_bytes``: up to so many do not queue at the cards (packets interleave). ``behind``: a channel whose earlier
    messages arrive before.
    """

    def __init__(
        self,
        time: VirtualTime,
        source: Card,
        target: Card,
        latency_seconds: float,
        jitter: Callable[[], float] | None = None,
        small_bytes: int = 1500,
        behind: VirtualChannel | None = None,
    ) -> None:
        check_number("latency_seconds", latency_seconds, least=0)
        self._time, self._source, self._target = time, source, target
        self._jitter, self._small, self._behind = jitter, small_bytes, behind
        self.latency_seconds = latency_seconds
        self._last = 0.0
        self.open, self.busy, self.waiting = True, False, deque[tuple[Any, int]]()

    def send(self, size: int, deliver: Callable[[], None], sent: Callable[[], None] | None = None) -> None:
        """Deliver a message of ``size`` bytes; ``sent`` is called when this end of the channel is free again."""
        now = self._time.now
        if size <= self._small:
            self._source.bytes += size
            self._target.bytes += size
            left = passed = now
        else:
            left = self._source.pass_on(now, size)
            passed = self._target.pass_on(left, size) if self._target is not self._source else left
        arrival = passed + self.latency_seconds + (self._jitter() if self._jitter else 0.0)
        self._last = max(self._last, arrival, self._behind._last if self._behind is not None else 0.0)
        if sent is not None:
            self._time.after(left - now, sent)

        def arrive() -> None:
            if self.open:
                deliver()

        self._time.after(self._last - now, arrive)


class VirtualPeer:
    """One end of a simulated connection: what :class:`thinwire.systems.link.peer.Peer` is on a network.

    ``size_of``: a tensor -> its bytes. ``count``: called with each message that is sent, and its bytes.
    """

    host, ended, other = "127.0.0.1", True, PeerIdentity("node", 0)
    far: VirtualPeer

    def __init__(
        self, time: VirtualTime, channel: Callable[[VirtualChannel | None], VirtualChannel],
        size_of: Callable[[Tensor], int], count: Callable[[Any, int], None],
    ) -> None:  # fmt: skip
        self._time, self._channel, self._size_of, self._count = time, channel, size_of, count
        self._channels = [channel(None)]  # for messages with tensors, the last
        self._posted = self._sent = self.sent_bytes = self.received_bytes = 0
        self._due = False
        self.early: list[Any] = []  # messages that came before this end has started
        self.options: dict[str, Any] = {}

    def start(self, codec: Any, **options: Any) -> None:
        self.options = options
        if options.get("channels", 1) == 2:
            self._channels.append(self._channel(self._channels[0]))
        for message in self.early:
            options["deliver"](message)

    def post(self, message: Any) -> None:
        channel = self._channels[0 if getattr(message, "tensor", None) is None else -1]
        channel.waiting.append((message, self._posted))
        self._posted += channel is self._channels[0]
        self._pump()

    def report_due(self) -> None:
        self._due = True
        self._pump()

    def close(self) -> None:
        """End the connection; the other side notices."""
        for channel in (*self._channels, *self.far._channels):
            channel.open = False
        self.far.options.get("closed", lambda why: None)("the other side has closed")

    def cut(self) -> None:
        """End it from outside: both sides notice."""
        self.close()
        self.far.close()

    def _pump(self) -> None:
        """Give messages to channels whose end is free; a report only if nothing else waits."""
        for channel in self._channels:
            if channel.busy or not channel.open:
                continue
            first, queue, message = channel is self._channels[0], channel.waiting, None
            if queue and (first or self._sent >= queue[0][1]):
                message, _ = queue.popleft()
                self._sent += first
            elif self._due and first:
                self._due, message = False, self.options["compose"]()
            if message is not None:
                self._send(channel, message)

    def _send(self, channel: VirtualChannel, message: Any) -> None:
        tensor, frame = getattr(message, "tensor", None), FRAME.size + ROW_BYTES * len(getattr(message, "rows", ()))
        far, size = self.far, frame
        if tensor is not None:
            size += self._size_of(tensor)
            message = replace(message, tensor=tensor.reshape(-1).view(torch.uint8))
            if size > frame and (announced := far.options.get("announced")) is not None:
                # the frame arrives before its tensor, so the receiver does not think that the sender is dead
                seconds = allowance(size, far.options["seconds"])
                self._time.after(channel.latency_seconds, partial(announced, seconds))
        channel.busy = True
        self._count(message, size)
        self.sent_bytes += size

        def sent() -> None:
            channel.busy = False
            self._pump()

        def arrived() -> None:
            far.received_bytes += size
            far.options.get("deliver", far.early.append)(message)

        channel.send(size, arrived, sent)


class _ServerNow(ServerDriver):
    def __init__(self, sim: _Simulation) -> None:
        super().__init__(Server(sim.settings), sim.layout)
        self._sim = sim
        sim.take_in(self)

    def _record(self, effect: Apply) -> None:
        sim, rows = self._sim, [(p.node, r.worker, r.step, r.base) for p in effect.contributions for r in p.rows]
        sim.trace.updates.append((effect.version, sim.time.now, rows))
        sim.lines.append(Update.of(effect, sim.time.now))


class _ShardNow(ShardDriver):
    def __init__(self, sim: _Simulation, index: int) -> None:
        super().__init__(index)
        sim.take_in(self)


class _NodeNow(NodeDriver):
    def __init__(self, sim: _Simulation, number: int, link: Link) -> None:
        super().__init__(sim.settings, sim.layout, number, sim.workers, len(sim.shards))
        self._sim, self.link, self.cards = sim, link, (Card(link.bits_per_second), Card(link.bits_per_second))
        self.paused_until, self.alive = 0.0, True
        self.leader.instance, self._long = 0, math.inf
        sim.take_in(self)
        self.places = {k: self._worker(k) for k in range(sim.workers)}

    def cut(self) -> None:
        for peer in self._up.peers if self._up is not None else ():
            peer.cut()  # type: ignore[attr-defined]

    def look(self) -> None:
        """Connect to the server and, with a ticket, to the shards, in no time."""
        sim, ticket = self._sim, next(self._sim.tickets)
        shards = []
        for shard, cards in zip(sim.shards, sim.cards[1:]):
            near, far = sim.connect(self, cards)
            shard.take(far, ticket)  # type: ignore[arg-type]
            shards.append(near)
        near, far = sim.connect(self, sim.cards[0])
        far.options = {"deliver": lambda hello: sim.server.tell("came", far, hello)}
        near.post(replace(self.leader.hello(), ticket=ticket))
        self.tell("up", Uplink(near, shards, self._sums))  # type: ignore[arg-type]

    def _worker(self, number: int) -> WorkerPlace:
        sim, work, theta = self._sim, LocalWork(self._sim.settings.sync_every, self._sim.inner), list[Tensor]()

        def compute(message: Any) -> None:
            if not isinstance(message, msg.Work):
                return
            if message.tensor is not None:
                theta[:] = [message.tensor]
            node = self.leader.node
            seconds = sum(sim.step_seconds(node, number, message.step + i, sim.random) for i in range(message.steps))
            tensor = work.submission(
                theta[0], message.step, message.steps, lambda x, i: sim.gradient(x, node, number, i)
            )
            finite = tensor if bool(tensor.isfinite().all()) else None
            result = msg.Result(message.token, 1, 0.0, seconds / message.steps, finite)
            sim.time.after(seconds, lambda: self.tell("worker", place, result))

        place = WorkerPlace(number, LocalPeer(compute, lambda reason: None))
        return place

    def _from_worker(self, worker: WorkerPlace, message: Any, now: float) -> None:
        if self._workers.get(worker.number) is worker:
            self._sim.trace.finished += self.leader.running.get(worker.number) == message.token
        super()._from_worker(worker, message, now)


class _Simulation:
    def __init__(
        self, settings: Settings, nodes: int, workers: int, link: Link | Callable[[int], Link], server_link: Link,
        step_seconds: StepSeconds, parameters: Tensor | None, gradient: GradientOf | None, outer: Outer | None,
        seed: int, payload_bytes: int, shards: int, inner: Outer | None,
    ) -> None:  # fmt: skip
        self.inner, self.settings, self.workers, self.step_seconds = inner, settings, workers, step_seconds
        self.random, self.time, self.trace, self.lines = random.Random(seed), VirtualTime(), Trace(), list[Update]()
        self.tickets = itertools.count(1)
        self.gradient = gradient or (lambda theta, node, worker, batch: torch.zeros_like(theta))
        if parameters is None:  # the protocol alone
            coded = settings.compress_up or settings.compress_down  # so many elements that its headers do not count
            parameters, outer = torch.zeros(4096 if coded else max(1, shards)), lambda p: torch.optim.SGD(p, lr=0.0)
        outer = outer or default_outer(settings, nodes)
        model = nn.Module()
        model.flat = nn.Parameter(parameters.detach().clone())
        self.layout = Layout.of(model)
        whole = parameters.numel() * parameters.element_size()
        self._size_of = lambda x: payload_bytes * x.nbytes // whole
        self.cards = [(Card(server_link.bits_per_second), Card(server_link.bits_per_second)) for _ in range(1 + shards)]
        self.shards = [_ShardNow(self, index) for index in range(shards)]
        self.server = server = _ServerNow(self)
        if not shards:
            end = ServerEnd(settings, self.layout.numel, self.layout.dtype)
            server.weights = LocalWeights(FlatWeights(parameters, outer, settings), end)
        else:
            server.weights = server.shards = ShardedWeights(
                shards, self.layout, settings, server.machine, self.layout.flat(model), keeps=False, run=0,
                outer=fingerprint(outer, self.layout.dtype), clock=server.clock, tell=server.tell,
                on_ready=lambda places: None, on_failed=lambda why: None,
            )  # fmt: skip
        fast = Card(None), Card(None)  # only frames go from and to the server
        for shard in self.shards:
            near, far = self._pair(Link(server_link.latency_seconds), fast, fast)
            shard.begin(near, WeightSlice(settings, self.layout, outer, shard.index, shards))  # type: ignore[arg-type]
            number = fingerprint(outer, self.layout.dtype)
            server.tell("register", far, msg.RegisterShard(shard.index, 1, msg.PROTOCOL, False, number))
        while not server.ready:
            self.time.step()
        self.nodes = [_NodeNow(self, n, link(n) if callable(link) else link) for n in range(nodes)]
        for node in self.nodes:
            self.enter(node)
        self.heartbeat()

    @property
    def theta(self) -> Tensor:
        """The weights."""
        parts = [shard.slice.weights.theta for shard in self.shards if shard.slice is not None]
        return torch.cat(parts) if parts else self.server.weights.weights.theta  # type: ignore[union-attr]

    def take_in(self, actor: Actor) -> None:
        """Let an actor live here: it handles what it is told at once or, if it is paused, afterwards; dead, never."""

        def handle(*event: Any) -> None:
            if isinstance(actor, _NodeNow) and self.time.now < actor.paused_until:
                self.time.after(actor.paused_until - self.time.now, lambda: handle(*event))
            elif not isinstance(actor, _NodeNow) or actor.alive:
                actor.handle(*event)

        def tell(what: str, who: Any = None, value: Any = None) -> None:
            self.time.after(0.0, lambda: handle(what, who, value))

        actor.tell, actor.warn = tell, lambda *words: None  # type: ignore[method-assign]
        actor.clock = lambda: self.time.now

    def _pair(
        self, link: Link, here: tuple[Card, Card], there: tuple[Card, Card],
        count: Callable[[str, Any, int], None] = lambda *_: None,
    ) -> tuple[VirtualPeer, VirtualPeer]:  # fmt: skip
        """Connect two machines; cards: out, in."""
        jitter = None if link.jitter is None else partial(link.jitter, self.random)
        ends = []
        for way, source, target in (("up", here[0], there[1]), ("down", there[0], here[1])):
            channel = partial(VirtualChannel, self.time, source, target, link.latency_seconds, jitter, 1500)
            ends.append(VirtualPeer(self.time, channel, self._size_of, partial(count, way)))
        ends[0].far, ends[1].far = ends[1], ends[0]
        return ends[0], ends[1]

    def connect(self, node: _NodeNow, cards: tuple[Card, Card]) -> tuple[VirtualPeer, VirtualPeer]:
        return self._pair(node.link, node.cards, cards, self._count)

    def _count(self, way: str, message: Any, size: int) -> None:
        self.trace.messages[type(message).__name__] += 1
        if way == "up":
            self.trace.bytes_up += size
        else:
            self.trace.bytes_down += size

    def enter(self, node: _NodeNow) -> None:
        for place in node.places.values():
            node.handle("enter", place, None)

    def heartbeat(self) -> None:
        self.server.tick()
        for node in self.nodes:
            if node.alive and self.time.now >= node.paused_until:
                node.tick()
        self.time.after(self.settings.lease_seconds / 10, self.heartbeat)

    def fault(self, fault: Fault) -> None:
        node = self.nodes[fault.node]
        if fault.kind == "pause":
            node.paused_until = self.time.now + fault.for_seconds
        elif fault.worker is not None:
            node.handle("left" if fault.kind == "kill" else "enter", node.places[fault.worker], None)
        elif fault.kind == "return":
            node = self.nodes[fault.node] = _NodeNow(self, fault.node, node.link)
            self.enter(node)
        else:
            node.alive = fault.kind == "cut"
            node.cut()


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
    inner: Outer | None = None,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    payload_bytes: int | None = None,
    shards: int = 0,
    evaluate: Callable[[Tensor], float] | None = None,
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
        inner: makes a worker's, of local steps; by default SGD with lr 0.05.
        payload_bytes: of one tensor as sent; by default that of ``parameters``.
        shards: k machines, each with a link like the server's and a slice of the weights; 0: the server holds them.
        evaluate: weights -> loss, called every second of virtual time.

    Raises:
        ValueError: there is no end, or no update comes, as on a link on which joining takes too long.
    """
    if updates is None and gradients is None and seconds is None:
        raise ValueError("say when to end: updates, gradients or seconds")
    check_count("nodes", nodes)
    check_count("workers", workers)
    check_count("shards", shards, 0)
    if payload_bytes is None:
        payload_bytes = 0 if parameters is None else parameters.numel() * parameters.element_size()
    sim = _Simulation(
        settings, nodes, workers, link, server_link, step_seconds, parameters, gradient, outer,
        seed, payload_bytes, shards, inner,
    )  # fmt: skip
    for fault in faults:
        sim.time.after(fault.at_seconds, partial(sim.fault, fault))
    if evaluate is not None and parameters is not None:

        def look() -> None:
            sim.trace.losses.append((sim.time.now, evaluate(sim.theta)))
            sim.time.after(1.0, look)

        sim.time.after(0.0, look)
    last_fault = max((fault.at_seconds for fault in faults), default=0.0)
    server = sim.server.machine

    def reached() -> bool:
        if not any(node.alive for node in sim.nodes) and sim.time.now > last_fault:
            return True  # nothing more can happen
        newest = max(last_fault, sim.trace.updates[-1][1] if sim.trace.updates else 0.0)
        if seconds is None and sim.time.now > newest + _UNMOVED_SECONDS:
            raise ValueError(f"no update in {_UNMOVED_SECONDS:.0f} s: is the link too slow for what is sent?")
        return (updates is not None and server.version >= updates) or (
            gradients is not None and server.counters["applied"] >= gradients
        )

    while sim.time.next[0] <= (math.inf if seconds is None else seconds) and not reached():
        sim.time.step()
    trace = sim.trace
    trace.updates = trace.updates[: server.version]
    trace.seconds, trace.counters = sim.time.now, server.counters
    trace.parameters = None if parameters is None else sim.theta.clone()
    trace.journal = Journal(settings, {"seed": seed, "nodes": nodes}, tuple(sim.lines[: server.version]))
    return trace
