"""The server process: connects the state machine with real connections, the journal and the checkpoints."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_count
from thinwire.core.durable import readable
from thinwire.systems.link.actor import Actor
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import Trust, check_identity, find_trust
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.peer import Peer
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import ServerEnd, most_bytes
from thinwire.systems.parameter_server.effects import Apply, Drop, Effect, Forget, Refuse, Send
from thinwire.systems.parameter_server.errors import ShardLost
from thinwire.systems.parameter_server.journal import JournalWriter, Update
from thinwire.systems.parameter_server.layout import Layout, RunningBuffers, slices
from thinwire.systems.parameter_server.outer import FlatWeights, LocalWeights, Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import ShardedWeights, refuse
from thinwire.systems.parameter_server.status import Ages, Status, status_of

_FAREWELL_SECONDS = 5.0
_LEFT_BEHIND = "lives and makes no progress: training goes on without it until it does"

logger = logging.getLogger("thinwire")


class ServerDriver(Actor):
    """Does what a :class:`Server` asks for, and tells it what happens. ``shards``: the weights, if shards have them."""

    weights: LocalWeights | ShardedWeights
    shards: ShardedWeights | None = None

    def __init__(self, machine: Server, layout: Layout) -> None:
        super().__init__()
        self.settings, self.machine, self.layout = machine.settings, machine, layout
        self.buffers = RunningBuffers(layout.buffers)
        self._members: dict[int, Peer] = {}
        self._coming: dict[tuple[int, int], tuple[Peer, int]] = {}  # by node and instance, with the ticket
        self._past = [0, 0]  # bytes from and to members that have gone
        self._late = set[int]()

    @property
    def ready(self) -> bool:
        return self.shards is None or self.shards.ready

    def take(self, peer: Peer, hello: bytes) -> None:
        """Take whoever has connected; may be called from any thread. ``ValueError``: it speaks as somebody else."""
        message, _, _ = msg.decode(hello)
        if isinstance(message, msg.Hello) and 0 < message.workers <= msg.MOST_WORKERS:
            check_identity(peer.other, "node", message.node)
            self.tell("came", peer, message)
        elif isinstance(message, msg.RegisterShard) and self.shards is not None:
            check_identity(peer.other, "shard", message.index)
            self.tell("register", peer, message)
        else:
            raise ValueError("it does not begin as a node or a shard does")

    def handle(self, what: str, who: Any, value: Any) -> None:
        now = self.clock()
        if what == "message":
            for message in (value,) if self.shards is None else self.shards.on_message(who, value, now):
                self._do(self.machine.on(message, now))
        elif what == "came":
            self._park(who, value, now)
        elif what == "gone":
            self._do(self.machine.gone(who, now))
        elif what == "buffers":
            self.buffers.add(value)
        elif what == "expect":
            self.machine.expect(who, value, now)
        elif self.shards is not None:
            for message in self.shards.on_event((what, who, value), now):
                self._do(self.machine.on(message, now))

    def tick(self) -> None:
        now = self.clock()
        self._do(self.machine.tick(now))
        for number in self.machine.late - self._late:
            self.warn("node %d %s", self.machine.members[number].node, _LEFT_BEHIND)
        self._late = set(self.machine.late)
        for member in self.shards.overdue(now) if self.shards is not None else ():
            self._do(self.machine.gone(member, now))

    def _park(self, peer: Peer, hello: msg.Hello, now: float) -> None:
        """Keep the connection of a leader that said HELLO, replacing an earlier one of the same process."""
        self._reject(hello.node, hello.instance)
        self._coming[hello.node, hello.instance] = peer, hello.ticket
        if hello.protocol == msg.PROTOCOL and hello.layout != self.layout.number:
            self._reject(hello.node, hello.instance, msg.OTHER_MODEL)
        elif self.ready:
            self._do(self.machine.on(hello, now))
        else:  # not yet: it says HELLO again until the weights are there
            self._reject(hello.node, hello.instance)

    def _reject(self, node: int, instance: int, reason: int = 0) -> None:
        peer, _ = self._coming.pop((node, instance), (None, 0))
        if peer is not None and reason:
            refuse(peer, node, reason)
        elif peer is not None:
            peer.close()

    def _admit(self, member: int) -> None:
        row = self.machine.members[member]
        peer, ticket = self._coming.pop((row.node, row.instance), (None, 0))
        if peer is None:
            return
        if self.shards is not None:
            self.shards.add_member(member, ticket)

        def deliver(message: Any) -> None:
            if getattr(message, "member", None) != member:
                raise ValueError("a node speaks for another: its connection is closed")
            if isinstance(message, msg.Buffers):
                self.tell("buffers", member, self.layout.buffers.read(message.tensor))
                return
            self.tell("message", member, self.weights.read(message) if isinstance(message, msg.Grad) else message)

        self._members[member] = peer
        peer.start(
            msg.CODEC,
            channels=self.settings.channels if self.shards is None else 1,  # only frames: an Assembly orders them
            seconds=self.settings.lease_seconds,
            most_bytes=most_bytes(self.settings, self.layout),
            deliver=deliver,
            closed=partial(self.tell, "gone", member),
            announced=partial(self.tell, "expect", member),
        )

    def _forget(self, member: int) -> None:
        self.weights.forget(member)
        peer = self._members.pop(member, None)
        if peer is not None:
            self._past = [self._past[0] + peer.received_bytes, self._past[1] + peer.sent_bytes]
            self.retire(peer)

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.member, effect.message)
            elif isinstance(effect, Apply):
                self.weights.apply(effect, self._shows(effect.version + 1), partial(self._applied, effect))
            elif isinstance(effect, Drop):
                if self.shards is not None:
                    self.shards.drop(effect.tensor)
            elif isinstance(effect, Forget):
                self._forget(effect.member)
            elif isinstance(effect, Refuse):
                self._reject(effect.node, effect.instance, effect.reason)

    def _send(self, member: int, message: msg.Message) -> None:
        if isinstance(message, msg.Welcome):
            self._admit(member)
        peer = self._members.get(member)
        if peer is None:
            return
        if isinstance(message, msg.Stop) and self.buffers.value is not None:
            peer.post(msg.Buffers(member, self.buffers.value))
        peer.post(self.weights.attach_payload(member, message))

    def _applied(self, effect: Apply, theta: Tensor | None) -> None:
        self._record(effect)
        after = self.machine.applied(self.clock())
        self._made(self.machine.version, theta)
        self._do(after)

    def _shows(self, version: int) -> bool:
        """Return whether the weights of a version are to be shown to ``_made``."""
        return False

    def _record(self, effect: Apply) -> None:
        """Note an update."""

    def _made(self, version: int, theta: Tensor | None) -> None:
        """Do what is due at a new version."""


class Service(ServerDriver):
    """Serves one model to nodes that come and go.

    Args:
        model: its trainable parameters are the initial weights, and hold the result at the end.
        settings: sent to every node.
        port: to listen on; 0 chooses a free one.
        outer_text: sent to shards that are started from a command line.
        nodes: the expected number; it sets ``c`` of the default optimizer and does not limit who may join.
        checkpoint_every: updates between checkpoints.
        facts: for the journal's first line.
        on_update: called with the version and the weights after the first update and then after every
            ``on_update_every``; it must not modify the weights. Shards send theirs to the server for this.
        trust: who may connect (:func:`find_trust`); by default who knows the secret of ``THINWIRE_SECRET_FILE``.
        host, outer, shards, updates, gradients, checkpoint_dir, journal, on_status: as for
            :func:`serve`; without an end, until ``stop`` is called.

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
        trust: Trust = None,
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
    ) -> None:
        check_count("on_update_every", on_update_every)
        self.model = model
        layout, count = Layout.of(model), nodes or settings.start_nodes
        if shards:
            slices(layout.numel, shards)  # raises if the model cannot be cut into so many
        self.saves = checkpoints.Saves(checkpoint_dir, checkpoint_every)
        saved = self.saves.load(layout, shards)
        # above all member numbers of earlier runs, even of a run without a checkpoint
        first = (time.time_ns() >> 20) << 10
        machine = Server(settings, first_member=first)
        if saved is not None:
            first = max(first, saved.next_member)
            machine = Server(settings, version=saved.version, first_member=first, positions=saved.positions)
            machine.counters.update(saved.counters)
        super().__init__(machine, layout)
        if saved is not None:
            self.buffers.value = saved.buffers
        self._updates, self._gradients = updates, gradients
        self._on_update, self._every, self._on_status = on_update, on_update_every, on_status
        self._positions = dict(machine.positions)
        self.weights = self._make_weights(outer or default_outer(settings, count), shards, saved)
        self._ages = Ages()
        self._began, self._next_status = time.monotonic(), 0.0
        self._ends_at: float | None = None
        self._over = self._closed = False
        notes = {
            "settings": settings.to_json(),
            "layout": layout.to_json(),
            "shards": json.dumps({"count": shards, "places": []}),
            "nodes": str(count),
            "updates": str(updates or 0),
            "outer": outer_text or ("auto" if outer is None else ""),
        }
        self._listener = Listener(port, host, notes, roles=("node", "shard"), trust=trust or find_trust())
        try:  # only after listening: another server on this port may be writing the journal
            self._journal = JournalWriter(journal, settings, facts or {}, self.saves.resumed) if journal else None
        except ValueError:
            self._listener.close()
            raise

    def _make_weights(
        self, outer: Outer, shards: int, saved: checkpoints.Saved | None
    ) -> LocalWeights | ShardedWeights:
        theta, settings, keeps = self.layout.flat(self.model), self.settings, self.saves.directory is not None
        if not shards:
            weights = FlatWeights(theta, outer, settings)
            if keeps:
                readable(weights.optimizer.state_dict(), "optimizer")  # refuse now what no checkpoint could hold
            if saved is not None:
                weights.restore(saved.theta, saved.optimizer)
            return LocalWeights(weights, ServerEnd(settings, self.layout.numel, self.layout.dtype))
        run, start = (secrets.randbits(62), theta) if saved is None else (saved.run, None)
        self.shards = ShardedWeights(
            shards, self.layout, settings, self.machine, start, outer=fingerprint(outer, self.layout.dtype),
            keeps=keeps, run=run, clock=self.clock, tell=self.tell, on_ready=self._publish,
            on_failed=self.saves.failed,
        )  # fmt: skip
        return self.shards

    def _publish(self, addresses: str) -> None:
        if self.saves.directory and self.saves.fresh:
            self._save()  # from here on, server and shards can continue together after a restart
        self._listener.note("shards", addresses)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._listener.port

    def run(self) -> Status:
        """Serve until the end. Return the last status; the model then holds the final weights.

        Raises:
            ShardLost: a shard has gone or does not answer, or ``stop`` was called before all shards were there.
        """
        self._listener.serve(self.take, FRAME.size)
        try:
            self.run_until(self._ended, min(0.2, self.settings.lease_seconds / 10))
            weights = self.weights
            theta = weights.weights.theta if isinstance(weights, LocalWeights) else weights.last(self.next_event)
            self._over = True
        finally:
            self.close()
        self.layout.write(theta, self.model)
        self.buffers.write(self.model)
        return self.status()

    def _ended(self) -> bool:
        now = self.clock()
        if self._ends_at is None and self.ready and not self.machine.applying and self._reached():
            self._ends_at = now + _FAREWELL_SECONDS
            self._do(self.machine.finish(now))
        return self._ends_at is not None and (now > self._ends_at or not self.machine.members)

    def handle(self, what: str, who: Any, value: Any) -> None:
        if what != "stop":
            super().handle(what, who, value)
            return
        self._updates = self.machine.version
        if not self.ready:
            raise ShardLost("stopped while it waited for its shards, without which there are no last weights")

    def tick(self) -> None:
        super().tick()
        if self._on_status is not None and self.clock() >= self._next_status:
            self._on_status(self.status())
            self._next_status = self.clock() + 0.5

    def stop(self) -> None:
        """End the training after the current update; may be called from any thread."""
        self.tell("stop")

    def close(self) -> None:
        """Save what is new, and close all connections. ``run`` calls this at its end."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for node, instance in list(self._coming):
            self._reject(node, instance)
        self.retire(*self._members.values(), finish=True)
        self.join(_FAREWELL_SECONDS, least=0.1)
        try:
            saves, machine = self.saves, self.machine
            if saves.directory and machine.version > saves.resumed and not machine.applying:
                self._settle()
                self._save()
                self._settle()
                if self._over:
                    saves.check_last(machine.version)
        finally:
            if self._journal is not None:
                self._journal.close()
            if self.shards is not None:
                self.shards.close(self.machine.version if self._over else None)

    def _settle(self) -> None:
        if self.shards is not None:
            self.shards.settle(self.next_event)

    def _reached(self, updates: int = 0, gradients: int = 0) -> bool:
        version, applied = self.machine.version + updates, self.machine.counters["applied"] + gradients
        enough = self._updates is not None and version >= self._updates
        return enough or (self._gradients is not None and applied >= self._gradients)

    def _shows(self, version: int) -> bool:
        return self._on_update is not None and (version == 1 or version % self._every == 0)

    def _record(self, effect: Apply) -> None:
        self._ages.add(effect)
        self._positions = dict(self.machine.positions)  # of what is applied; more may come in next
        if self._reached(1, sum(len(part.rows) for part in effect.contributions)):
            self.machine.finished = True  # send no more weights, make no more updates
        if self._journal is None:
            return
        try:
            self._journal.write(Update.of(effect, time.monotonic() - self._began))
        except OSError as error:
            self._journal = None
            self.warn("%s: training goes on, and the journal ends with version %d", error, effect.version)

    def _made(self, version: int, theta: Tensor | None) -> None:
        if self.saves.due(version):
            self._save()
        if theta is not None and self._on_update is not None:
            self._on_update(version, theta)

    def _save(self) -> None:
        machine = self.machine
        assert self.saves.directory is not None
        saved = checkpoints.Saved(
            torch.empty(0), {}, machine.version, machine.next_member, self._positions, dict(machine.counters),
            self.layout.to_json(), self.buffers.value,
        )  # fmt: skip
        try:
            self.weights.save(self.saves.directory, saved)
        except (OSError, ValueError) as error:
            self.saves.failed(str(error))

    def status(self) -> Status:
        """Return the current status; may be called from any thread."""
        shards, traffic, past = self.shards, {}, self._past
        for number, peer in list(self._members.items()):
            up, down = (0, 0) if shards is None else shards.traffic(number)
            traffic[number] = peer.received_bytes + up, peer.sent_bytes + down
        if shards is not None:
            past = [past[0] + shards.past[0], past[1] + shards.past[1]]
        rows = () if shards is None else shards.status()
        cut = self.weights.weights.clip.cut if isinstance(self.weights, LocalWeights) else None
        return status_of(self.machine, self._ages, traffic, past, time.monotonic() - self._began, rows, cut)
