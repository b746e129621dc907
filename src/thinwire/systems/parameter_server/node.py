"""A node: runs the leader's state machine between the connection to the server and those to this machine's workers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.systems.link.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import Badge
from thinwire.systems.link.meeting import Meeting
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.secret import find_trust
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server.connection import Anything
from thinwire.systems.parameter_server.crew import Crew
from thinwire.systems.parameter_server.effects import Effect, GiveUp, Join, Leave, Report, Send, Start
from thinwire.systems.parameter_server.ending import unended
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.line import Line, ShardsToCome, SlicedLine, reach, shard_count
from thinwire.systems.parameter_server.messages import Buffers, Grad, Hello, Message, Result, Stop, Weights
from thinwire.systems.parameter_server.packing import SumsOut, most_bytes
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.slices import slices
from thinwire.systems.parameter_server.worker import NodeRefused, ServerLost

_FAREWELL_SECONDS = 5.0

logger = logging.getLogger("thinwire")


class Node:
    """Runs a :class:`Leader` on real connections, in its own threads; workers may come, die and come back.

    Args:
        server: ``host:port`` of the server.
        node: number of this node.
        workers: W, the number of workers.
        port: for this machine's workers, on the loopback interface; 0 chooses a free one.
        secret: the server's, which workers must know too; by default that of ``THINWIRE_SECRET_FILE``.
        keys: directory of this node's identity, if the server uses keys; its workers need the same one.
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
        secret: str | bytes | None = None,
        keys: str | Path | Credentials | None = None,
    ) -> None:
        self._server, self._leases = server, leases
        self._badge = Badge("node", node, find_trust(secret, keys))
        meeting = self._meet(60.0)
        self.settings = Settings.from_json(meeting.note("settings"))
        self.layout = Layout.from_json(meeting.note("layout"))
        self.leader = Leader(self.settings, node, workers, layout=self.layout.number, instance=secrets.randbits(62))
        self.leader.alive.clear()
        self.failure: RuntimeError | None = None
        self._up: Line | None = None
        self._old: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._theta: Tensor | None = None
        self._last: Tensor | None = None
        self._last_buffers: Tensor | None = None
        pieces = slices(self.layout.numel, max(1, shard_count(meeting)))
        self._sums = SumsOut(self.settings, self.layout.dtype, pieces)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._wanted = threading.Event()
        self._crew = Crew(
            self.settings, self.layout, workers, port, self._badge.trust, self._lock,
            came=lambda number: self._do(self.leader.returned(number, time.monotonic())),
            lost=lambda number: self._do(self.leader.lost(number, time.monotonic())),
            result=self._result,
        )  # fmt: skip
        self._crew.open()
        for loop in (self._join_loop, self._tick_loop):
            thread = threading.Thread(target=loop, name=f"thinwire{loop.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self._crew.port

    @property
    def address(self) -> str:
        """``host:port`` for workers."""
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

    def see_off(self, seconds: float) -> None:
        """After the end: wait up to ``seconds`` for workers that have not connected yet; they get the final weights."""
        self._crew.see_off(seconds)

    def close(self) -> None:
        """Leave: at the end of training once the workers have left, otherwise at once."""
        self._crew.close(_FAREWELL_SECONDS * self._over.is_set())
        self._over.set()
        self._wanted.set()
        with self._lock:
            lines = [*([self._up] if self._up else [])]
        for line in lines:
            line.close()
        for line in [*lines, *self._old]:
            line.join(2.0)
        for thread in self._threads:
            thread.join(2.0)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- the server's side ----------------------------------------------------------------------------------------

    def _meet(self, seconds: float) -> Meeting:
        end = time.monotonic() + seconds
        while True:
            try:
                return Meeting(self._server, self._badge)
            except NotAdmitted as error:
                raise NodeRefused(str(error)) from error
            except PairError as error:
                if time.monotonic() > end:
                    raise ServerLost(f"{error}: start `thinwire ps server` there, or correct --server") from error
                time.sleep(0.3)

    def _join_loop(self) -> None:
        """Connect whenever the leader wants to join."""
        been, lost_at = False, None
        while not self._over.is_set():
            self._wanted.wait()
            if self._over.is_set():
                return
            lease = self.settings.lease_seconds
            try:
                pair, shards = reach(self._server, self.leader.hello(), self._badge, min(10.0, 2 * lease))
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
            if max(1, len(shards)) != len(self._sums.pieces):
                for other in (pair, *shards):
                    other.close()
                self._give_up(ServerLost("the server came back with another number of shards: restart this node"))
                return
            with self._lock:
                if self._over.is_set():  # closed in the meantime: nobody else would close these
                    for other in (pair, *shards):
                        other.close()
                    return
                self._wanted.clear()
                if self._up is not None:
                    self._retire(self._up)
                self._up = self._connect(pair, shards)
                self._up.start()

    def _retire(self, line: Line) -> None:
        line.close()
        self._old = unended(self._old, line)
        self._up = None

    def _connect(self, pair: Pair, shards: list[Pair]) -> Line:
        box: list[Line] = []

        def current() -> bool:
            return bool(box) and self._up is box[0]

        def deliver(message: Anything) -> None:
            with self._lock:
                if current():
                    self._from_server(message)

        def closed(reason: str) -> None:
            with self._lock:
                if current() and not self._over.is_set():
                    self._do(self.leader.ended(reason, time.monotonic()))

        def announced(seconds: float) -> None:
            with self._lock:
                self.leader.expect(seconds, time.monotonic())

        def compose() -> Message | None:
            with self._lock:
                return self.leader.report(time.monotonic()) if current() and self.leader.member else None

        most = most_bytes(self.settings, self.layout)
        if shards:
            line: Line = SlicedLine(
                pair, shards, self._sums, lock=self._lock, most_bytes=most,
                deliver=deliver, closed=closed, announced=announced, compose=compose,
            )  # fmt: skip
        else:
            line = Line(
                pair, self._sums, most_bytes=most,
                deliver=deliver, closed=closed, announced=announced, compose=compose,
            )  # fmt: skip
        box.append(line)
        return line

    def _from_server(self, message: Any) -> None:
        if isinstance(message, Weights) and message.tensor is not None:
            self._theta = message.tensor
        if isinstance(message, Stop) and message.tensor is not None:
            self._last = message.tensor
        if isinstance(message, Buffers):
            self._last_buffers = self.layout.buffers.read(message.tensor)
            return
        self._do(self.leader.on(message, time.monotonic()))

    # --- the workers' side ----------------------------------------------------------------------------------------

    def _result(self, worker: int, message: Result) -> None:
        tensor = None if message.tensor is None else self.layout.read(message.tensor)
        effects = self.leader.done(
            worker, message.token, tensor, time.monotonic(), samples=message.samples, loss=message.loss,
            finite=tensor is not None, seconds=message.seconds,
        )  # fmt: skip
        self._do(effects)

    # --- effects --------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, Hello):
                    self._wanted.set()
                elif self._up is not None:
                    self._post(self._up, effect.message)
            elif isinstance(effect, Report):
                if self._up is not None:
                    self._up.report_due()
            elif isinstance(effect, Start):
                if self._theta is not None:
                    self._crew.give(effect, self._theta)
            elif isinstance(effect, Join):
                if effect.reason:
                    number, reason = self.leader.node, effect.reason
                    logger.warning("node %d has lost its server (%s) and is reconnecting", number, reason)
                if self._up is not None:
                    self._retire(self._up)
                self._do(self.leader.join(time.monotonic()))
            elif isinstance(effect, Leave):
                if self._up is not None:
                    self._up.finish()
                self._end(effect.version)
            elif isinstance(effect, GiveUp):
                self._give_up(NodeRefused(effect.reason))

    def _post(self, up: Line, message: Message) -> None:
        buffers = self._crew.buffers() if isinstance(message, Grad) and message.tensor is not None else None
        if buffers is not None:
            up.post(Buffers(message.member, buffers))  # type: ignore[union-attr]
        up.post(message)

    def _give_up(self, failure: RuntimeError) -> None:
        self.failure = failure
        with self._lock:  # the join thread calls this too, while workers come and go
            self._end(-1)
        self._crew.refuse()

    def _end(self, version: int) -> None:
        self._crew.end(version, self._last, self._last_buffers)
        self._over.set()

    def _tick_loop(self) -> None:
        lease = self.settings.lease_seconds
        while not self._over.wait(lease / 10):
            with self._lock:
                now = time.monotonic()
                self._do(self.leader.tick(now))
                if self._up is not None and self._up.overdue(now):
                    self._do(self.leader.ended("weights did not arrive completely in time", now))
                self._crew.ping()
