"""A node: runs the leader's state machine between the connection to the server and this machine's workers."""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.tls import Credentials
from thinwire.systems.link.actor import Actor, NotYet, Over, find
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity, Trust, check_identity, find_trust, own_trust
from thinwire.systems.link.listener import Caller, Listener, connect, split_address
from thinwire.systems.link.peer import LocalPeer, Peer, allowance
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import SumsOut, WeightsIn, most_bytes
from thinwire.systems.parameter_server.effects import Effect, GiveUp, Join, Leave, Report, Send, Start
from thinwire.systems.parameter_server.errors import NodeRefused, ServerLost
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import Assembly, shard_count

LONG_LEASES = 6.0
_FAREWELL_SECONDS = 5.0
_POLL_SECONDS = 1.0

logger = logging.getLogger("thinwire")


def number_of_host(*more: str) -> int:
    """Return the number that a node has by default: of this host's name and, if there are, ``more`` words."""
    return zlib.crc32(" ".join([socket.gethostname(), *more]).encode()) & 0xFFFF


class Uplink:
    """A leader's connection to the server and, if the model is in shards, one more to each shard, used as one.

    Frames go to the server; tensors follow them or, in pieces, go to the shards.
    """

    def __init__(self, server: Peer, shards: list[Peer], sums: SumsOut) -> None:
        self.server, self.shards, self._sums = server, shards, sums
        self._weights, self._assembly = WeightsIn(sums), Assembly(len(shards), sums.settings.channels == 1)
        self._seconds = allowance(sums.pieces[-1].stop * sums.dtype.itemsize, sums.settings.lease_seconds)

    def start(self, most_bytes: int, tell: Callable[[str, Any, Any], None], compose: Callable[[], Any | None]) -> None:
        """Let ``tell`` know what happens: "server" or "piece" with what comes, "expect", and "gone"."""
        settings = self._sums.settings
        options: dict[str, Any] = {"seconds": settings.lease_seconds, "most_bytes": most_bytes}
        options["announced"] = partial(tell, "expect", self)
        channels = 1 if self.shards else settings.channels
        deliver, closed = partial(tell, "server", self), partial(tell, "gone", self)
        self.server.start(msg.CODEC, channels=channels, deliver=deliver, closed=closed, compose=compose, **options)
        for index, shard in enumerate(self.shards):
            piece = partial(lambda index, message: tell("piece", self, (index, message)), index)
            gone = partial(lambda index, reason: tell("gone", self, f"shard {index}: {reason}"), index)
            shard.start(msg.CODEC, deliver=piece, closed=gone, silent=True, **options)

    def post(self, message: Any) -> None:
        if isinstance(message, msg.Grad) and message.tensor is not None:
            parts = self._sums.pack(message.tensor)
            for shard, part in zip(self.shards, parts):
                shard.post(msg.Piece(message.member, message.seq, False, part))
            message = replace(message, tensor=None if self.shards else parts[0])
        self.server.post(message)

    @property
    def peers(self) -> list[Peer]:
        return [self.server, *self.shards]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    @property
    def until(self) -> float | None:
        """Return when pieces of weights are late; None: none is awaited. A single connection notices that by itself."""
        return self._assembly.until

    def message(self, message: Any, now: float) -> list[Any]:
        """Take a message of the server; return what is whole and next in order, with the weights as numbers."""
        if not self.shards:
            if isinstance(message, msg.Weights) and message.tensor is not None:
                message = replace(message, tensor=self._weights.unpack(0, message.tensor, message.delta))
            return [message]
        number = message.grant if isinstance(message, msg.Weights) and not message.same else None
        number = msg.LAST if isinstance(message, msg.Stop) else number
        return self._whole(self._assembly.message(message, number, self._seconds, now))

    def piece(self, index: int, message: Any, now: float) -> list[Any]:
        """The same, of a shard."""
        if not isinstance(message, msg.Piece) or message.tensor is None:
            return []  # a sign of life
        tensor = self._weights.unpack(index, message.tensor, message.delta)
        return self._whole(self._assembly.piece(message.number, index, tensor, now))

    def _whole(self, ready: list[tuple[Any, list[Any] | None]]) -> list[Any]:
        return [m if pieces is None else replace(m, tensor=torch.cat(pieces)) for m, pieces in ready]


@dataclass(eq=False)
class WorkerPlace:
    """A worker that is there: the weights that it has, the buffers that it sent, when its work counts as long."""

    number: int
    peer: Peer | LocalPeer
    given: Tensor | None = None
    buffers: Tensor | None = None
    late_at: float = math.inf


class NodeDriver(Actor):
    """Does what a :class:`Leader` asks for, and tells it what happens; :meth:`look` finds the server."""

    def __init__(self, settings: Settings, layout: Layout, node: int, workers: int, shards: int) -> None:
        super().__init__()
        self.settings, self.layout = settings, layout
        self.leader = Leader(settings, node, workers, layout=layout.number, instance=secrets.randbits(62))
        self.leader.alive.clear()
        self.failure: RuntimeError | None = None
        self._up: Uplink | None = None
        self._theta: Tensor | None = None
        self._last: Tensor | None = None
        self._last_buffers: Tensor | None = None
        self._sums = SumsOut(settings, layout.dtype, slices(layout.numel, max(1, shards)))
        self._most_bytes = most_bytes(settings, layout)
        self._workers: dict[int, WorkerPlace] = {}
        self._seen: set[int] = set()
        self._long = LONG_LEASES * settings.lease_seconds
        self._farewell: tuple[Any, ...] = ()
        self._lock = threading.RLock()
        self._over, self._closed = threading.Event(), False

    def look(self) -> None:
        """Say HELLO to the server, and tell "up" once it has been reached, or "refused"."""
        raise NotImplementedError

    def handle(self, what: str, who: Any, value: Any) -> None:
        with self._lock:
            now = self.clock()
            if what == "up":
                self._start(who)
            elif what == "refused":
                self._give_up(value)
            elif what == "enter":
                self._add(who)
            elif what == "left":
                self._remove(who)
            elif what == "worker":
                self._from_worker(who, value, now)
            elif who is self._up and who is not None:
                self._from_uplink(who, what, value, now)

    def tick(self) -> None:
        with self._lock:
            now = self.clock()
            self._do(self.leader.tick(now))
            if self._up is not None and now > (self._up.until or math.inf):
                self._do(self.leader.ended("weights did not arrive completely in time", now))
            self._name_late(now)

    def enter(self, number: int, deliver: Callable[[Any], None]) -> LocalPeer:
        """Let in a worker of this process; return where it posts its messages. ``ServerLost``: this node was closed.

        ``deliver``: called with every message to the worker and, at the end, with the reason.
        """
        if self._closed:
            raise ServerLost(f"worker {number}: its node was closed")
        worker = WorkerPlace(number, LocalPeer(deliver, deliver))
        self.tell("enter", worker)
        return LocalPeer(partial(self.tell, "worker", worker), lambda reason: self.tell("left", worker))

    @property
    def connected(self) -> bool:
        return self._up is not None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over the present connection."""
        return sum(peer.sent_bytes for peer in self._up.peers) if self._up is not None else 0

    def _start(self, up: Uplink) -> None:
        if self._up is not None:
            self.retire(*self._up.peers)
        self._up = up

        def compose() -> msg.Message | None:
            with self._lock:
                return self.leader.report(self.clock()) if self._up is up and self.leader.member else None

        up.start(self._most_bytes, self.tell, compose)

    def _from_uplink(self, up: Uplink, what: str, value: Any, now: float) -> None:
        if what == "gone":
            if not self._over.is_set():
                self._do(self.leader.ended(value, now))
            return
        if what == "expect":
            self.leader.expect(value, now)
            return
        try:
            whole = up.message(value, now) if what == "server" else up.piece(value[0], value[1], now)
            if (until := up.until) is not None:
                self.leader.expect(until - now, now)
            for message in whole:
                self._from_server(message)
        except ValueError as error:  # from none of our servers
            self._do(self.leader.ended(str(error), now))

    def _from_server(self, message: Any) -> None:
        if isinstance(message, msg.Weights) and message.tensor is not None:
            self._theta = message.tensor
        if isinstance(message, msg.Stop) and message.tensor is not None:
            self._last = message.tensor
        if isinstance(message, msg.Buffers):
            self._last_buffers = self.layout.buffers.read(message.tensor)
            return
        self._do(self.leader.on(message, self.clock()))

    def _add(self, worker: WorkerPlace) -> None:
        if (old := self._workers.get(worker.number)) is not None:
            old.peer.close()
            self._remove(old)
        self._workers[worker.number] = worker
        self._seen.add(worker.number)
        for farewell in self._farewell:
            worker.peer.post(farewell)
        if not self._farewell:
            self._do(self.leader.returned(worker.number, self.clock()))

    def _remove(self, worker: WorkerPlace) -> None:
        if self._workers.get(worker.number) is worker:
            del self._workers[worker.number]
            self._do(self.leader.lost(worker.number, self.clock()))

    def _from_worker(self, worker: WorkerPlace, message: Any, now: float) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        try:
            if isinstance(message, msg.Buffers):
                worker.buffers = self.layout.buffers.read(message.tensor)
            elif isinstance(message, msg.Result):
                worker.late_at = math.inf
                tensor = None if message.tensor is None else self.layout.read(message.tensor)
                effects = self.leader.done(
                    worker.number, message.token, tensor, now, samples=message.samples, loss=message.loss,
                    finite=tensor is not None, seconds=message.seconds,
                )  # fmt: skip
                self._do(effects)
        except ValueError as error:
            self.warn("worker %d is sent away: %s", worker.number, error)
            worker.peer.close()
            self._remove(worker)

    def _give(self, start: Start, theta: Tensor) -> None:
        worker = self._workers.get(start.worker)
        if worker is None:
            return
        tensor = None if worker.given is theta else theta
        worker.given, worker.late_at = theta, self.clock() + self._long
        worker.peer.post(msg.Work(start.token, start.version, start.step, start.steps, tensor))

    def _name_late(self, now: float) -> None:
        """Name a worker that lives and is long about its work, but do not give it up."""
        late = [worker for worker in self._workers.values() if now > worker.late_at]
        for worker in late:
            worker.late_at = math.inf
            self.warn("worker %d is alive but has handed in nothing for %g s", worker.number, self._long)
        self._long *= 2.0 if late else 1.0  # it may always take as long: say so a few times only

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            up = self._up
            if isinstance(effect, Send):
                if isinstance(effect.message, msg.Hello):
                    self.look()
                elif up is not None:
                    self._post(up, effect.message)
            elif isinstance(effect, Report):
                if up is not None:
                    up.server.report_due()
            elif isinstance(effect, Start):
                if self._theta is not None:
                    self._give(effect, self._theta)
            elif isinstance(effect, Join):
                if effect.reason:
                    number, reason = self.leader.node, effect.reason
                    self.warn("node %d has lost its server (%s) and is reconnecting", number, reason)
                if up is not None:
                    self.retire(*up.peers)
                self._up = None
                self._do(self.leader.join(self.clock()))
            elif isinstance(effect, Leave):
                if up is not None:
                    self.retire(*up.peers, finish=True)
                self._end(effect.version)
            elif isinstance(effect, GiveUp):
                self._give_up(NodeRefused(effect.reason))

    def _post(self, up: Uplink, message: msg.Message) -> None:
        if isinstance(message, msg.Grad) and message.tensor is not None:
            rows = [worker.buffers for worker in self._workers.values() if worker.buffers is not None]
            if rows:
                up.post(msg.Buffers(message.member, self.layout.buffers.mean(rows)))
        up.post(message)

    def _give_up(self, failure: RuntimeError) -> None:
        self.failure = failure
        self._end(-1)

    def _end(self, version: int) -> None:
        """Tell all workers, also those that come later, that training is over; each then closes its connection."""
        first = () if self._last_buffers is None else (msg.Buffers(0, self._last_buffers),)
        self._farewell = (*first, msg.Stop(0, version, self._last))
        for worker in list(self._workers.values()):
            for message in self._farewell:
                worker.peer.post(message)
        self._over.set()


class Node(NodeDriver):
    """Runs a :class:`Leader` on real connections, in a thread of its own; workers may come, die and come back.

    Args:
        server: ``host:port`` of the server.
        node: number of this node.
        workers: W, the number of workers.
        port: for this machine's workers, on the loopback interface; 0 chooses a free one.
        trust: as for :class:`Shard`; its workers need the same.
        patience: seconds without a server after which to give up; by default six leases.

    Attributes:
        updates: after which the server ends; 0: it has not said.

    Raises:
        ServerLost: there is no server at that address.
        NodeRefused: the server does not let this node in.
    """

    def __init__(
        self, server: str, node: int, workers: int, *, port: int = 0, patience: float | None = None, trust: Trust = None
    ) -> None:
        self._server = server
        self._identity = PeerIdentity("node", node, trust or find_trust())
        try:
            caller = find(lambda: Caller(server, self._identity), 60.0, 0.3)
        except NotAdmitted as error:
            raise NodeRefused(str(error)) from error
        except PairError as error:
            raise ServerLost(f"{error}: start `thinwire ps server` there, or correct --server") from error
        settings, layout = Settings.from_json(caller.note("settings")), Layout.from_json(caller.note("layout"))
        super().__init__(settings, layout, node, workers, shard_count(caller))
        self.patience = 6 * settings.lease_seconds if patience is None else patience
        self.updates = int(caller.note("updates"))
        self._known = self._looks = False
        notes = {"settings": settings.to_json(), "layout": layout.to_json()}
        trust = own_trust(self._identity.trust)
        self._listener = Listener(port, "127.0.0.1", notes, roles=("worker",), trust=trust)
        self._listener.serve(self._came, FRAME.size)
        self._threads = [threading.Thread(target=self._run, name="thinwire-node", daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self._listener.port

    @property
    def address(self) -> str:
        """``host:port`` for workers of other processes."""
        return f"127.0.0.1:{self.port}"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until training has ended; return whether it has.

        Raises:
            ServerLost: the server did not come back.
            NodeRefused: the server does not let this node in.
        """
        ended = self._over.wait(seconds)
        if self.failure is not None:
            raise self.failure
        return ended

    def wait_for_stragglers(self, seconds: float) -> None:
        """After the end: wait up to ``seconds`` for workers that have not connected yet; they get the final weights.

        Such a worker, finding nobody, would think that its node has not started yet.
        """
        end = time.monotonic() + seconds
        while len(self._seen) < self.leader.workers and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        """Leave: at the end of training once the workers have left, otherwise at once."""
        end = time.monotonic() + _FAREWELL_SECONDS * self._over.is_set()
        while self._workers and time.monotonic() < end:
            time.sleep(0.01)
        self._listener.close()
        self._closed = True
        self._over.set()
        self.tell("closed")
        for thread in reversed(self._threads):
            thread.join(2.0)
        while (event := self.next_event(0.0)) is not None:
            if event[0] == "up":
                self.retire(*event[1].peers)
        for worker in list(self._workers.values()):
            worker.peer.close()
            worker.peer.join(2.0)
        if self._up is not None:
            self.retire(*self._up.peers)
        self.join(2.0, least=2.0)

    def _run(self) -> None:
        try:
            self.run_until(lambda: self._closed, self.settings.lease_seconds / 10)
        except Exception:
            logger.exception("node %d ends because of a bug in thinwire", self.leader.node)
            self._give_up(ServerLost("this node has failed: its output says why"))

    def _came(self, peer: Peer, hello: bytes) -> None:
        """Let in a worker of another process."""
        message, _, _ = msg.decode(hello)
        if not isinstance(message, msg.Enter) or not 0 <= message.worker < self.leader.workers:
            raise ValueError("it does not begin as a worker does")
        check_identity(peer.other, "worker", message.worker)
        worker = WorkerPlace(message.worker, peer)
        self.tell("enter", worker)
        peer.start(
            msg.CODEC,
            seconds=self.settings.lease_seconds,
            most_bytes=self._most_bytes,
            deliver=partial(self.tell, "worker", worker),
            closed=lambda reason: self.tell("left", worker),
            beat=msg.Ping(),
        )

    def _give_up(self, failure: RuntimeError) -> None:
        super()._give_up(failure)
        self._listener.close()

    def look(self) -> None:
        if not self._looks:
            self._looks = True
            self._threads[1:] = [threading.Thread(target=self._look, name="thinwire-join", daemon=True)]
            self._threads[1].start()

    def _start(self, up: Uplink) -> None:
        self._looks = False
        super()._start(up)

    def _look(self) -> None:
        lease, hello = self.settings.lease_seconds, self.leader.hello()
        try:
            server, shards = find(
                lambda: reach(self._server, hello, self._identity, min(10.0, 2 * lease)),
                self.patience, min(0.5, lease / 4), self._over, self._known,
            )  # fmt: skip
        except Over:
            return
        except (NotAdmitted, ValueError) as error:  # for example, the keys on this machine were removed
            self.tell("refused", None, NodeRefused(str(error)))
            return
        except PairError as error:
            text = f"no server at {self._server} for {self.patience:g} s: {error}"
            self.tell("refused", None, ServerLost(text))
            return
        self._known = True
        up = Uplink(server, shards, self._sums)
        if self._over.is_set():  # closed in the meantime: nobody else would close these
            up.close()
            return
        if len(up.shards or [server]) != len(self._sums.pieces):
            self.tell("refused", None, ServerLost("the server has another number of shards: restart this node"))
            up.close()
            return
        self.tell("up", up)


def reach(server: str, hello: msg.Hello, identity: PeerIdentity, seconds: float) -> tuple[Peer, list[Peer]]:
    """Say HELLO to a server; if it has shards, first show a ticket to each. ``NotYet``: it waits for its shards."""
    caller = Caller(server, identity, seconds)
    end = time.monotonic() + _POLL_SECONDS
    while len((notes := json.loads(caller.note("shards")))["places"]) < notes["count"]:
        if time.monotonic() > end:
            raise NotYet(f"the server at {server} waits for its {notes['count']} shards")
        time.sleep(0.1)
        caller.refresh()
    shards: list[Peer] = []
    try:
        ticket = 1 + secrets.randbits(61) if notes["count"] else 0
        for index, (host, port, fingerprint) in enumerate(notes["places"]):
            if isinstance(identity.trust, Credentials):
                identity = replace(identity, trust=identity.trust.pinned(fingerprint))
            shards.append(_show(host or split_address(server)[0], port, ticket, index, identity, seconds))
        return caller.connect(msg.encode(replace(hello, ticket=ticket))), shards
    except PairError:
        for shard in shards:
            shard.close()
        raise


def _show(host: str, port: int, ticket: int, index: int, identity: PeerIdentity, seconds: float) -> Peer:
    peer = None
    try:
        peer = connect(host, port, msg.encode(msg.Ticket(ticket)), identity, seconds)
        peer.receive_frame(FRAME.size, seconds)  # the shard answers once it knows the ticket
        return peer
    except PairError as error:
        if peer is not None:
            peer.close()
        raise type(error)(f"shard {index} at {host}:{port}: {error}") from error
