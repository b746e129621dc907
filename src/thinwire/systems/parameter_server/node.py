"""A node: runs the leader's state machine between the connection to the server and this machine's workers."""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.tls import Credentials
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity, Trust, check_identity, find_trust, own_trust
from thinwire.systems.link.listener import Caller, Listener, connect, split_address
from thinwire.systems.link.peer import SLOWEST, LocalPeer, Peer, join_all, unended
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import SumsOut, WeightsIn, most_bytes
from thinwire.systems.parameter_server.effects import Effect, GiveUp, Join, Leave, Report, Send, Start
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import Assembly, shard_count
from thinwire.systems.parameter_server.worker import NodeRefused, ServerLost

LONG_LEASES = 6.0
_FAREWELL_SECONDS = 5.0
_POLL_SECONDS = 1.0

logger = logging.getLogger("thinwire")


class Uplink:
    """A leader's connection to the server and, if the model is in shards, one more to each shard, used as one.

    Frames go to the server; tensors follow them or, in pieces, go to the shards. ``lock``: held in every ``deliver``.
    """

    def __init__(self, server: Peer, shards: list[Peer], sums: SumsOut, lock: threading.RLock) -> None:
        self.server, self.shards, self._sums, self._lock = server, shards, sums, lock
        self._weights, self._assembly = WeightsIn(sums), Assembly(len(shards), sums.settings.channels == 1)
        self._seconds = sums.settings.lease_seconds + sums.pieces[-1].stop * sums.dtype.itemsize / SLOWEST

    def start(
        self, most_bytes: int, deliver: Callable[[Any], None], closed: Callable[[str], None],
        announced: Callable[[float], None], compose: Callable[[], Any | None],
    ) -> None:  # fmt: skip
        self._deliver, self._announced, settings = deliver, announced, self._sums.settings
        options: dict[str, Any] = {"seconds": settings.lease_seconds, "most_bytes": most_bytes, "announced": announced}
        channels = 1 if self.shards else settings.channels
        self.server.start(msg.CODEC, channels=channels, deliver=self._came, closed=closed, compose=compose, **options)
        for index, shard in enumerate(self.shards):
            gone = partial(lambda index, reason: closed(f"shard {index}: {reason}"), index)
            shard.start(msg.CODEC, deliver=partial(self._piece, index), closed=gone, silent=True, **options)

    def post(self, message: Any) -> None:
        if isinstance(message, msg.Grad) and message.tensor is not None:
            parts = self._sums.pack(message.tensor)
            for shard, part in zip(self.shards, parts):
                shard.post(msg.Piece(message.member, message.seq, False, part))
            message = replace(message, tensor=None if self.shards else parts[0])
        self.server.post(message)

    def finish(self) -> None:
        for peer in (self.server, *self.shards):
            peer.finish()

    def close(self) -> None:
        for peer in (self.server, *self.shards):
            peer.close()

    def overdue(self, now: float) -> bool:
        """Return whether pieces of weights are late; a single connection notices that by itself."""
        return bool(self.shards) and self._assembly.overdue(now)

    def _came(self, message: Any) -> None:
        if not self.shards:
            if isinstance(message, msg.Weights) and message.tensor is not None:
                message = replace(message, tensor=self._weights.unpack(0, message.tensor, message.delta))
            self._deliver(message)
            return
        number = message.grant if isinstance(message, msg.Weights) and not message.same else None
        with self._lock:
            now = time.monotonic()
            number = msg.LAST if isinstance(message, msg.Stop) else number
            self._forward(self._assembly.message(message, number, self._seconds, now), now)

    def _piece(self, index: int, message: Any) -> None:
        if not isinstance(message, msg.Piece) or message.tensor is None:
            return  # a sign of life
        with self._lock:
            now = time.monotonic()
            tensor = self._weights.unpack(index, message.tensor, message.delta)
            self._forward(self._assembly.piece(message.number, index, tensor, now), now)

    def _forward(self, ready: list[tuple[Any, list[Any] | None]], now: float) -> None:
        if self._assembly.until is not None:
            self._announced(self._assembly.until - now)
        for message, pieces in ready:
            self._deliver(message if pieces is None else replace(message, tensor=torch.cat(pieces)))


@dataclass(eq=False)
class _Worker:
    """A worker that is there: the weights that it has, the buffers that it sent, when its work counts as long."""

    peer: Peer | LocalPeer
    given: Tensor | None = None
    buffers: Tensor | None = None
    late_at: float = math.inf


class Node(AbstractContextManager["Node"]):
    """Runs a :class:`Leader` on real connections, in its own threads; workers may come, die and come back.

    Args:
        server: ``host:port`` of the server.
        node: number of this node.
        workers: W, the number of workers.
        port: for this machine's workers, on the loopback interface; 0 chooses a free one.
        trust: as for :class:`Shard`; its workers need the same.
        leases: give up after that many leases without a server.

    Raises:
        ServerLost: there is no server at that address.
        NodeRefused: the server does not let this node in.
    """

    def __init__(
        self,
        server: str,
        node: int,
        workers: int,
        *,
        port: int = 0,
        leases: float = 6.0,
        trust: Trust = None,
    ) -> None:
        self._server, self._leases = server, leases
        self._identity = PeerIdentity("node", node, trust or find_trust())
        caller = self._call(60.0)
        self.settings = Settings.from_json(caller.note("settings"))
        self.layout = Layout.from_json(caller.note("layout"))
        self.leader = Leader(self.settings, node, workers, layout=self.layout.number, instance=secrets.randbits(62))
        self.leader.alive.clear()
        self.failure: RuntimeError | None = None
        self._up: Uplink | None = None
        self._old: list[Peer] = []
        self._theta: Tensor | None = None
        self._last: Tensor | None = None
        self._last_buffers: Tensor | None = None
        self._sums = SumsOut(self.settings, self.layout.dtype, slices(self.layout.numel, max(1, shard_count(caller))))
        self._most_bytes = most_bytes(self.settings, self.layout)
        self._workers: dict[int, _Worker] = {}
        self._seen: set[int] = set()
        self._long = LONG_LEASES * self.settings.lease_seconds
        self._farewell: tuple[Any, ...] = ()
        self._lock = threading.RLock()
        self._over, self._wanted, self._closed = threading.Event(), threading.Event(), False
        notes = {"settings": self.settings.to_json(), "layout": self.layout.to_json()}
        trust = own_trust(self._identity.trust)
        self._listener = Listener(port, "127.0.0.1", notes, roles=("worker",), trust=trust)
        self._listener.serve(self._enter, FRAME.size)
        loops = (self._join_loop, self._tick_loop)
        self._threads = [threading.Thread(target=x, name=f"thinwire{x.__name__}", daemon=True) for x in loops]
        for thread in self._threads:
            thread.start()

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
        self._closed = True
        self._listener.close()
        with self._lock:
            left = [worker.peer for worker in self._workers.values()]
        for peer in left:
            peer.close()
        for peer in left:
            peer.join(2.0)
        self._over.set()
        self._wanted.set()
        with self._lock:
            if self._up is not None:
                self._retire(self._up)
        join_all(self._old, 2.0, least=2.0)
        for thread in self._threads:
            thread.join(2.0)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _call(self, seconds: float) -> Caller:
        end = time.monotonic() + seconds
        while True:
            try:
                return Caller(self._server, self._identity)
            except NotAdmitted as error:
                raise NodeRefused(str(error)) from error
            except PairError as error:
                if time.monotonic() > end:
                    raise ServerLost(f"{error}: start `thinwire ps server` there, or correct --server") from error
                time.sleep(0.3)

    def _join_loop(self) -> None:
        been, lost_at, lease = False, None, self.settings.lease_seconds
        while not self._over.is_set():
            self._wanted.wait()
            if self._over.is_set():
                return
            try:
                server, shards = reach(self._server, self.leader.hello(), self._identity, min(10.0, 2 * lease))
            except ShardsToCome:
                lost_at = None
                continue
            except ValueError as error:  # for example, the keys on this machine were removed
                self._give_up(NodeRefused(str(error)))
                return
            except PairError as error:
                if isinstance(error, NotAdmitted) and not been:  # later, another program may use the lost server's port
                    self._give_up(NodeRefused(str(error)))
                    return
                lost_at = time.monotonic() if lost_at is None else lost_at
                if time.monotonic() - lost_at > self._leases * lease:
                    text = f"no server at {self._server} for {self._leases:g} leases: {error}"
                    self._give_up(ServerLost(text))
                    return
                time.sleep(min(0.5, lease / 4))
                continue
            been, lost_at = True, None
            up = Uplink(server, shards, self._sums, self._lock)
            if max(1, len(shards)) != len(self._sums.pieces):
                up.close()
                self._give_up(ServerLost("the server came back with another number of shards: restart this node"))
                return
            with self._lock:
                if self._over.is_set():  # closed in the meantime: nobody else would close these
                    up.close()
                    return
                self._wanted.clear()
                if self._up is not None:
                    self._retire(self._up)
                self._up = up
                self._start(up)

    def _retire(self, up: Uplink) -> None:
        up.close()
        self._old = unended(self._old, up.server, *up.shards)
        self._up = None

    def _start(self, up: Uplink) -> None:
        def deliver(message: Any) -> None:
            with self._lock:
                if self._up is up:
                    self._from_server(message)

        def closed(reason: str) -> None:
            with self._lock:
                if self._up is up and not self._over.is_set():
                    self._do(self.leader.ended(reason, time.monotonic()))

        def announced(seconds: float) -> None:
            with self._lock:
                self.leader.expect(seconds, time.monotonic())

        def compose() -> msg.Message | None:
            with self._lock:
                return self.leader.report(time.monotonic()) if self._up is up and self.leader.member else None

        up.start(self._most_bytes, deliver, closed, announced, compose)

    def _from_server(self, message: Any) -> None:
        if isinstance(message, msg.Weights) and message.tensor is not None:
            self._theta = message.tensor
        if isinstance(message, msg.Stop) and message.tensor is not None:
            self._last = message.tensor
        if isinstance(message, msg.Buffers):
            self._last_buffers = self.layout.buffers.read(message.tensor)
            return
        self._do(self.leader.on(message, time.monotonic()))

    def enter(self, number: int, deliver: Callable[[Any], None]) -> LocalPeer:
        """Let in a worker of this process; return where it posts its messages. ``ServerLost``: this node was closed.

        ``deliver``: called with every message to the worker and, at the end, with the reason.
        """
        if self._closed:
            raise ServerLost(f"worker {number}: its node was closed")
        worker = _Worker(LocalPeer(deliver, deliver))
        self._add(number, worker)
        return LocalPeer(partial(self._from_worker, number, worker), lambda reason: self._remove(number, worker))

    def _enter(self, peer: Peer, hello: bytes) -> None:
        message, _, _ = msg.decode(hello)
        if not isinstance(message, msg.Enter) or not 0 <= message.worker < self.leader.workers:
            raise ValueError("it does not begin as a worker does")
        number, worker = message.worker, _Worker(peer)
        check_identity(peer.other, "worker", number)
        self._add(number, worker)
        peer.start(  # only now: messages are taken from workers that are known
            msg.CODEC,
            seconds=self.settings.lease_seconds,
            most_bytes=self._most_bytes,
            deliver=partial(self._from_worker, number, worker),
            closed=lambda reason: self._remove(number, worker),
        )

    def _add(self, number: int, worker: _Worker) -> None:
        with self._lock:
            old = self._workers.get(number)
            if old is not None:
                old.peer.close()
                self._remove(number, old)
            self._workers[number] = worker
            self._seen.add(number)
            for farewell in self._farewell:
                worker.peer.post(farewell)
            if not self._farewell:
                self._do(self.leader.returned(number, time.monotonic()))

    def _remove(self, number: int, worker: _Worker) -> None:
        with self._lock:
            if self._workers.get(number) is worker:
                del self._workers[number]
                self._do(self.leader.lost(number, time.monotonic()))

    def _from_worker(self, number: int, worker: _Worker, message: Any) -> None:
        with self._lock:
            if self._workers.get(number) is not worker:
                return
            if isinstance(message, msg.Buffers):
                worker.buffers = self.layout.buffers.read(message.tensor)
            elif isinstance(message, msg.Result):
                worker.late_at = math.inf
                tensor = None if message.tensor is None else self.layout.read(message.tensor)
                effects = self.leader.done(
                    number, message.token, tensor, time.monotonic(), samples=message.samples, loss=message.loss,
                    finite=tensor is not None, seconds=message.seconds,
                )  # fmt: skip
                self._do(effects)

    def _give(self, start: Start, theta: Tensor) -> None:
        worker = self._workers.get(start.worker)
        if worker is None:
            return
        tensor = None if worker.given is theta else theta
        worker.given, worker.late_at = theta, time.monotonic() + self._long
        worker.peer.post(msg.Work(start.token, start.version, start.step, start.steps, tensor))

    def _ping(self) -> None:
        """Send a sign of life to all workers. Name one that lives and is long about its work, but do not give it up."""
        late = False
        for number, worker in self._workers.items():
            worker.peer.post(msg.Ping())
            if time.monotonic() > worker.late_at:
                worker.late_at, late = math.inf, True
                logger.warning("worker %d is alive but has handed in nothing for %g s", number, self._long)
        self._long *= 2.0 if late else 1.0  # it may always take as long: say so a few times only

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            up = self._up
            if isinstance(effect, Send):
                if isinstance(effect.message, msg.Hello):
                    self._wanted.set()
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
                    logger.warning("node %d has lost its server (%s) and is reconnecting", number, reason)
                if up is not None:
                    self._retire(up)
                self._do(self.leader.join(time.monotonic()))
            elif isinstance(effect, Leave):
                if up is not None:
                    up.finish()
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
        with self._lock:  # the join thread calls this too, while workers come and go
            self._end(-1)
        self._listener.close()

    def _end(self, version: int) -> None:
        """Tell all workers, also those that come later, that training is over; each then closes its connection."""
        first = () if self._last_buffers is None else (msg.Buffers(0, self._last_buffers),)
        self._farewell = (*first, msg.Stop(0, version, self._last))
        for worker in list(self._workers.values()):
            for message in self._farewell:
                worker.peer.post(message)
        self._over.set()

    def _tick_loop(self) -> None:
        lease = self.settings.lease_seconds
        while not self._over.wait(lease / 10):
            with self._lock:
                now = time.monotonic()
                self._do(self.leader.tick(now))
                if self._up is not None and self._up.overdue(now):
                    self._do(self.leader.ended("weights did not arrive completely in time", now))
                self._ping()


class ShardsToCome(RuntimeError):
    """The server is still waiting for its shards."""


def reach(server: str, hello: msg.Hello, identity: PeerIdentity, seconds: float) -> tuple[Peer, list[Peer]]:
    """Say HELLO to a server; if it has shards, first show a ticket to each. ``ShardsToCome``: try again later."""
    caller = Caller(server, identity, seconds)
    end = time.monotonic() + _POLL_SECONDS
    while len((notes := json.loads(caller.note("shards")))["places"]) < notes["count"]:
        if time.monotonic() > end:
            raise ShardsToCome(f"the server at {server} waits for its {notes['count']} shards")
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
