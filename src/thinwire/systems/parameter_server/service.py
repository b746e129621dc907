"""The server process: connects the state machine with real connections, the journal and the checkpoints."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.durable import readable
from thinwire.systems.link.hello import check_badge
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.secret import find_trust
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.buffers import RunningBuffers
from thinwire.systems.parameter_server.effects import Apply, Drop, Effect, Forget, Log, Refuse, Send
from thinwire.systems.parameter_server.fleet import Fleet
from thinwire.systems.parameter_server.journal import JournalWriter, Update
from thinwire.systems.parameter_server.keeper import Event, Keeper, Whole
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.links import Links
from thinwire.systems.parameter_server.messages import (
    FRAME,
    MOST_WORKERS,
    OTHER_MODEL,
    PROTOCOL,
    Buffers,
    Hello,
    Message,
    Stop,
    Welcome,
    decode,
)
from thinwire.systems.parameter_server.outer import Master, Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.packing import ServerEnd, most_bytes
from thinwire.systems.parameter_server.roster import Roster, ShardLost
from thinwire.systems.parameter_server.saves import Saves
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard_messages import Enlist
from thinwire.systems.parameter_server.slices import slices
from thinwire.systems.parameter_server.status import Ages, Status, status_of

_FAREWELL_SECONDS = 5.0

logger = logging.getLogger("thinwire")


class Service:
    """Serves one model to nodes that come and go.

    Args:
        model: its trainable parameters are the initial weights, and hold the result at the end.
        settings: sent to every node.
        port: to listen on; 0 chooses a free one.
        host: the address to listen at; one that other machines reach needs keys, a secret, or ``insecure``.
        secret: nodes and shards must know it; at least 16 bytes; by default that of ``THINWIRE_SECRET_FILE``.
        keys: directory of an identity written by ``thinwire keys new``, instead of a secret: TLS on all connections.
        insecure: let in everybody who reaches the port.
        outer: makes the optimizer of the flat weights; by default that of the settings.
        outer_text: sent to shards that are started from a command line.
        nodes: the expected number; it sets ``c`` of the default optimizer and does not limit who may join.
        shards: k processes that hold one slice of the weights each, see :class:`Shard`; 0: the server holds all
            weights.
        updates, gradients: when to end; None: when ``stop`` is called.
        checkpoint_dir: where checkpoints are written, and read to continue from.
        checkpoint_every: updates between checkpoints.
        journal: file for the log of updates. facts: for its first line.
        on_update: called with the version and the weights after the first update and then after every
            ``on_update_every``; it must not modify the weights. Shards send theirs to the server for this.
        on_status: called about twice a second.

    Attributes:
        saves: its checkpoints.

    Raises:
        ValueError: the checkpoint is of another model or another number of shards, or checkpoint_dir or journal cannot
            be written.
        PairError: the port is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        secret: str | bytes | None = None,
        keys: str | Path | Credentials | None = None,
        insecure: bool = False,
        outer: Outer | None = None,
        outer_text: str | None = None,
        nodes: int | None = None,
        shards: int = 0,
        updates: int | None = None,
        gradients: int | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 100,
        journal: str | Path | None = None,
        facts: dict[str, Any] | None = None,
        on_update: Callable[[int, Tensor], None] | None = None,
        on_update_every: int = 1,
        on_status: Callable[[Status], None] | None = None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda event, facts: None,
    ) -> None:
        if on_update_every < 1:
            raise ValueError(f"on_update_every={on_update_every!r} must be at least 1")
        self.settings, self.model, self.layout = settings, model, Layout.of(model)
        self._updates, self._gradients = updates, gradients
        self._on_update, self._every = on_update, on_update_every
        self._on_status, self._on_event = on_status, on_event
        count = nodes or settings.start_nodes
        if shards:
            slices(self.layout.numel, shards)  # raises if the model cannot be cut into so many
        self.saves = Saves(checkpoint_dir, checkpoint_every)
        saved = self.saves.load(self.layout, shards)
        # above all member numbers of earlier runs, even of a run without a checkpoint
        first = (time.time_ns() >> 20) << 10
        self.machine = Server(settings, first_member=first)
        self.buffers = RunningBuffers(self.layout.buffers)
        if saved is not None:
            self.buffers.value = saved.buffers
            first = max(first, saved.next_member)
            self.machine = Server(settings, version=saved.version, first_member=first, positions=saved.positions)
            self.machine.counters.update(saved.counters)
        self._positions = dict(self.machine.positions)
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self.keeper = self._make_keeper(outer or default_outer(settings, count), shards, count, saved)
        self._links = Links(settings, self.layout, self.keeper, self._tell)
        self._ages = Ages()
        self._began = time.monotonic()
        self._over = self._closed = False
        notes = {
            "settings": settings.to_json(),
            "layout": self.layout.to_json(),
            "shards": json.dumps({"count": shards, "places": []}),
            "nodes": str(count),
            "outer": outer_text or ("auto" if outer is None else ""),
        }
        self._listener = Listener(
            port, host, notes, roles=("node", "shard"), trust=find_trust(secret, keys), insecure=insecure
        )
        try:  # only after listening: another server on this port may be writing the journal
            self._journal = JournalWriter(journal, settings, facts or {}, self.saves.resumed) if journal else None
        except ValueError:
            self._listener.close()
            raise

    def _make_keeper(self, outer: Outer, shards: int, full: int, saved: checkpoints.Saved | None) -> Keeper:
        theta, settings = self.layout.flat(self.model), self.settings
        if not shards:
            end = ServerEnd(settings, self.layout.numel, self.layout.dtype)
            master = Master(theta, outer, settings, full)
            if self.saves.directory is not None:
                readable(master.optimizer.state_dict(), "optimizer")  # refuse now what no checkpoint could hold
            return Whole(master, end, saved)
        number = fingerprint(outer, self.layout.dtype)
        most, keeps = most_bytes(settings, self.layout), self.saves.directory is not None
        roster = Roster(shards, settings.lease_seconds, number, keeps, self._tell, most_bytes=most)
        run = secrets.randbits(62) if saved is None else saved.run
        start = theta if saved is None else None
        return Fleet(roster, self.layout, settings, self.machine, start, run=run, full=full,
                     ready=self._publish, failed=self.saves.failed)  # fmt: skip

    def _publish(self, addresses: str) -> None:
        """Let nodes join, because all shards are there."""
        if self.saves.directory and self.saves.fresh:
            self._save()  # from here on, server and shards can continue together after a restart
        self._listener.note("shards", addresses)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._listener.port

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Status:
        """Serve until the end. Return the last status; the model then holds the final weights.

        Raises:
            ShardLost: a shard has gone or does not answer, or ``stop`` was called before all shards were there.
        """
        self._listener.serve(self._came, FRAME.size)
        try:
            self._loop()
            theta = self.keeper.last(self._next_event)
            self._over = True
        finally:
            self.close()
        self.layout.write(theta, self.model)
        self.buffers.write(self.model)
        return self.status()

    def _loop(self) -> None:
        next_tick = next_status = 0.0
        lease = self.settings.lease_seconds
        ends_at: float | None = None
        while True:
            now = time.monotonic()
            if ends_at is None and self.keeper.ready and not self.machine.applying and self._reached():
                ends_at = now + _FAREWELL_SECONDS
                self._do(self.machine.finish(now))
            if ends_at is not None and (now > ends_at or not self.machine.members):
                return
            event = self._next_event(min(0.2, lease / 10))
            if event is not None:
                self._handle(event)
            now = time.monotonic()
            if now >= next_tick:
                while self._inbox.qsize():  # handle what has arrived first, so that its senders do not count as silent
                    self._handle(self._inbox.get())
                self._do(self.machine.tick(time.monotonic()))
                for member in self.keeper.tick(time.monotonic()):
                    self._do(self.machine.gone(member, time.monotonic()))
                next_tick = now + min(0.5, lease / 10)
            if self._on_status is not None and now >= next_status:
                self._on_status(self.status())
                next_status = now + 0.5

    def _next_event(self, seconds: float = 0.1) -> Event | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=seconds)
        return None

    def stop(self) -> None:
        """End the training after the current update; may be called from any thread."""
        self._tell("stop", None, None)

    def close(self) -> None:
        """Save what is new, and close all connections. ``run`` calls this at its end."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        self._links.finish(_FAREWELL_SECONDS)
        try:
            saves, machine = self.saves, self.machine
            if saves.directory and machine.version > saves.resumed and not machine.applying:
                self.keeper.settle(self._next_event)
                self._save()
                self.keeper.settle(self._next_event)
                if self._over:
                    saves.look_back(machine.version)
        finally:
            if self._journal is not None:
                self._journal.close()
            self.keeper.close(self.machine.version if self._over else None)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _reached(self, updates: int = 0, gradients: int = 0) -> bool:
        """Return whether the end is reached, or will be after that many more updates and gradients."""
        version, applied = self.machine.version + updates, self.machine.counters["applied"] + gradients
        enough = self._updates is not None and version >= self._updates
        return enough or (self._gradients is not None and applied >= self._gradients)

    def _tell(self, what: str, who: Any, value: Any) -> None:
        self._inbox.put((what, who, value))

    def _handle(self, event: Event) -> None:
        what, who, value = event
        now = time.monotonic()
        if what == "message":
            for message in self.keeper.heard(who, value, now):
                self._do(self.machine.on(message, now))
        elif what == "came":
            self._hello(who, value, now)
        elif what == "gone":
            self._do(self.machine.gone(who, now))
        elif what == "buffers":
            self.buffers.add(value)
        elif what == "expect":
            self.machine.expect(who, value, now)
        elif what == "stop":
            self._updates = self.machine.version
            if not self.keeper.ready:
                raise ShardLost("stopped while it waited for its shards, without which there are no last weights")
        else:
            for message in self.keeper.hear(event, now):
                self._do(self.machine.on(message, now))

    def _hello(self, pair: Pair, hello: Hello, now: float) -> None:
        self._links.hold(pair, hello)
        if hello.protocol == PROTOCOL and hello.layout != self.layout.number:
            self._links.turn_away(hello.node, hello.instance, OTHER_MODEL)
        elif self.keeper.ready:
            self._do(self.machine.on(hello, now))
        else:  # not yet: it says HELLO again until the weights are there
            self._links.turn_away(hello.node, hello.instance)

    def _came(self, pair: Pair, hello: bytes) -> None:
        message, _, _ = decode(hello)
        if isinstance(message, Hello) and 0 < message.workers <= MOST_WORKERS:
            check_badge(pair.other, "node", message.node)
            self._tell("came", pair, message)
        elif isinstance(message, Enlist):
            check_badge(pair.other, "shard", message.index)
            self._tell("enlist", (pair, pair.host), message)
        else:
            raise ValueError("it does not begin as a node or a shard does")

    # --- effects --------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.member, effect.message)
            elif isinstance(effect, Apply):
                self._apply(effect)
            elif isinstance(effect, Drop):
                self.keeper.drop(effect.tensor)
            elif isinstance(effect, Forget):
                self._links.forget(effect.member)
            elif isinstance(effect, Refuse):
                self._links.turn_away(effect.node, effect.instance, effect.reason)
            elif isinstance(effect, Log):
                self._on_event(effect.event, effect.facts)

    def _send(self, member: int, message: Message) -> None:
        if isinstance(message, Welcome):
            row = self.machine.members[member]
            self._links.open(member, row.node, row.instance)
        connection = self._links.members.get(member)
        if connection is None:
            return
        if isinstance(message, Stop) and self.buffers.value is not None:
            connection.post(Buffers(member, self.buffers.value))
        connection.post(self.keeper.dress(member, message))

    def _apply(self, effect: Apply) -> None:
        version = effect.version + 1
        show = self._on_update is not None and (version == 1 or version % self._every == 0)
        self.keeper.apply(effect, show, lambda theta: self._applied(effect, theta))

    def _applied(self, effect: Apply, theta: Tensor | None) -> None:
        self._ages.add(effect)
        self._record(effect)
        self._positions = dict(self.machine.positions)  # of what is applied; more may come in next
        if self._reached(1, sum(len(part.rows) for part in effect.contributions)):
            self.machine.finished = True  # send no more weights, make no more updates
        after = self.machine.applied(time.monotonic())
        version = self.machine.version
        if self.saves.due(version):
            self._save()
        if theta is not None and self._on_update is not None:
            self._on_update(version, theta)
        self._do(after)

    def _record(self, effect: Apply) -> None:
        if self._journal is None:
            return
        try:
            self._journal.write(Update.of(effect, time.monotonic() - self._began))
        except OSError as error:
            self._journal = None
            logger.warning("%s: training goes on, and the journal ends with version %d", error, effect.version)

    def _save(self) -> None:
        machine = self.machine
        assert self.saves.directory is not None
        saved = checkpoints.Saved(
            torch.empty(0),
            {},
            machine.version,
            machine.next_member,
            self._positions,
            dict(machine.counters),
            self.layout.to_json(),
            self.buffers.value,
        )
        try:
            self.keeper.save(self.saves.directory, saved)
        except (OSError, ValueError) as error:
            self.saves.failed(str(error))

    def status(self) -> Status:
        """Return the current status; may be called from any thread."""
        seconds = time.monotonic() - self._began
        links = self._links
        return status_of(self.machine, self._ages, links.traffic(), links.past(), seconds, self.keeper.shards())
