"""The server process: the state machine between real connections, the weights, the journal and the checkpoints."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives.pair import Listener, Pair, PairError
from thinwire.parameter_server import checkpoint as checkpoints
from thinwire.parameter_server.buffers import RunningBuffers
from thinwire.parameter_server.compress import Codec, Difference
from thinwire.parameter_server.connection import Anything, Connection
from thinwire.parameter_server.effects import Apply, Effect, Forget, Log, Refuse, Send
from thinwire.parameter_server.journal import JournalWriter, Update
from thinwire.parameter_server.layout import Layout
from thinwire.parameter_server.messages import (
    FRAME,
    OTHER_MODEL,
    PROTOCOL,
    Buffers,
    Grad,
    Hello,
    Message,
    Refused,
    Stop,
    Weights,
    Welcome,
    decode,
    encode,
)
from thinwire.parameter_server.outer import Master, Outer, default_outer
from thinwire.parameter_server.server import Server
from thinwire.parameter_server.settings import Settings
from thinwire.parameter_server.status import Ages, Status, status_of

_FAREWELL_SECONDS = 5.0


class Service:
    """Serves one model to nodes that come and go.

    Args:
        model: its trainable parameters are the start, and hold the result in the end.
        settings: published to every node.
        port: of the rendezvous; 0 takes a free one.
        outer: makes the optimizer of the flat weights; by default that of the settings.
        nodes: expected; sets ``c`` of the default optimizer, not who may come.
        updates, gradients: when to end; None: at ``stop``.
        directory: for checkpoints, and to go on from.
        save_every: updates between checkpoints.
        journal: file for the log of updates. facts: for its first line.
        on_update: called with the version and the weights after each update; they must not be edited.
        on_status: called about twice a second.

    Raises:
        ValueError: the checkpoint is of another model.
        PairError: the port is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        port: int = 0,
        host: str = "0.0.0.0",
        outer: Outer | None = None,
        nodes: int | None = None,
        updates: int | None = None,
        gradients: int | None = None,
        directory: str | Path | None = None,
        save_every: int = 100,
        journal: str | Path | None = None,
        facts: dict[str, Any] | None = None,
        on_update: Callable[[int, Tensor], None] = lambda version, theta: None,
        on_status: Callable[[Status], None] | None = None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda event, facts: None,
    ) -> None:
        if save_every < 1:
            raise ValueError(f"save_every={save_every!r} must be at least 1")
        self.settings, self.model, self.layout = settings, model, Layout.of(model)
        self._updates, self._gradients = updates, gradients
        self._directory, self._save_every = directory, save_every
        self._on_update, self._on_status, self._on_event = on_update, on_status, on_event
        count = nodes or settings.start_nodes
        self.buffers = RunningBuffers(self.layout.buffers)
        self.master = Master(self.layout.flat(model), outer or default_outer(settings, count), settings, count)
        first = (time.time_ns() >> 20) << 10  # above all members of an earlier life, even of one without a checkpoint
        self.machine = Server(settings, first_member=first)
        self._restore(first)
        self.resumed = self.machine.version
        self._positions = dict(self.machine.positions)
        self._journal = JournalWriter(journal, settings, facts or {}, self.resumed) if journal else None
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._coming: dict[tuple[int, int], Pair] = {}  # by node and instance
        self._connections: dict[int, Connection] = {}
        self._old: list[Connection] = []
        self._differences: dict[int, Difference] = {}
        self._snapshot = self.master.theta.clone()
        self._past = [0, 0]  # bytes of those who have gone
        self._ages = Ages()
        self._began = time.monotonic()
        notes = {"settings": settings.to_json(), "layout": self.layout.to_json()}
        self._listener = Listener(port, host, notes)

    def _restore(self, first: int) -> None:
        saved = checkpoints.load(self._directory) if self._directory else None
        if saved is None:
            return
        if saved.layout != self.layout.to_json():
            self.layout.check(Layout.from_json(saved.layout))
        with torch.no_grad():
            self.master.theta.copy_(saved.theta)
        self.buffers.value = saved.buffers
        self.master.optimizer.load_state_dict(saved.optimizer)
        self.machine = Server(
            self.settings,
            version=saved.version,
            first_member=max(first, saved.next_member),
            positions=saved.positions,
        )
        self.machine.counters.update(saved.counters)

    @property
    def port(self) -> int:
        """Of the rendezvous."""
        return self._listener.port

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Status:
        """Serve until the end. Returns the last status; the model holds the last weights."""
        self._listener.serve(self._came, FRAME.size)
        next_tick = next_status = 0.0
        lease = self.settings.lease_seconds
        ends_at: float | None = None
        try:
            while True:
                now = time.monotonic()
                if self._reached() and ends_at is None:
                    ends_at = now + _FAREWELL_SECONDS
                    self._do(self.machine.finish(now))
                if ends_at is not None and (now > ends_at or not self.machine.members):
                    break
                with contextlib.suppress(queue.Empty):
                    self._handle(*self._inbox.get(timeout=min(0.2, lease / 10)))
                now = time.monotonic()
                if now >= next_tick:
                    while self._inbox.qsize():  # whoever has sent something is not silent
                        self._handle(*self._inbox.get())
                    self._do(self.machine.tick(time.monotonic()))
                    next_tick = now + min(0.5, lease / 10)
                if self._on_status is not None and now >= next_status:
                    self._on_status(self.status())
                    next_status = now + 0.5
        finally:
            self.close()
        self.layout.write(self.master.theta, self.model)
        self.buffers.write(self.model)
        return self.status()

    def stop(self) -> None:
        """End the training after what is being done now; from any thread."""
        self._inbox.put(("stop", None, None))

    def close(self) -> None:
        """Let everything go."""
        self._listener.close()
        for connection in self._connections.values():
            connection.finish()
        end = time.monotonic() + _FAREWELL_SECONDS
        for connection in [*self._connections.values(), *self._old]:
            connection.join(max(0.1, end - time.monotonic()))
        if self._directory and self.machine.version > self.resumed and not self.machine.applying:
            self._save()
        if self._journal is not None:
            self._journal.close()

    def _reached(self, updates: int = 0, gradients: int = 0) -> bool:
        """Whether the end is there, or will be after so many more."""
        version, applied = self.machine.version + updates, self.machine.counters["applied"] + gradients
        enough = self._updates is not None and version >= self._updates
        return enough or (self._gradients is not None and applied >= self._gradients)

    def _handle(self, what: str, who: Any, value: Any) -> None:
        now = time.monotonic()
        if what == "message":
            self._do(self.machine.on(value, now))
        elif what == "came":
            self._turn_away(value, self._coming.pop((value.node, value.instance), None))
            if value.protocol == PROTOCOL and value.layout != self.layout.number:
                self._turn_away(value, who, OTHER_MODEL)
                return
            self._coming[value.node, value.instance] = who
            self._do(self.machine.on(value, now))
        elif what == "gone":
            self._do(self.machine.gone(who, now))
        elif what == "buffers":
            self.buffers.add(value)
        elif what == "expect":
            self.machine.expect(who, value, now)
        else:
            self._updates = self.machine.version

    # --- effects --------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.member, effect.message)
            elif isinstance(effect, Apply):
                self._apply(effect)
            elif isinstance(effect, Forget):
                self._forget(effect.member)
            elif isinstance(effect, Refuse):
                key = effect.node, effect.instance
                self._turn_away(effect, self._coming.pop(key, None), effect.reason)
            elif isinstance(effect, Log):
                self._on_event(effect.event, effect.facts)

    def _send(self, member: int, message: Message) -> None:
        if isinstance(message, Welcome):
            self._open(member)
        connection = self._connections.get(member)
        if connection is None:
            return
        if isinstance(message, Weights) and not message.same:
            message = self._weights(member, message)
        elif isinstance(message, Stop):
            if self.buffers.value is not None:
                connection.post(Buffers(member, self.buffers.value))
            message = replace(message, tensor=self._snapshot)
        connection.post(message)

    def _weights(self, member: int, message: Weights) -> Weights:
        if self.settings.compress_down is None:
            return replace(message, tensor=self._snapshot)
        difference = self._differences.get(member)
        if difference is None:
            codec = Codec(self.settings.compress_down, self.settings.density)
            difference = self._differences[member] = Difference(codec)
        tensor, delta = difference.encode(self._snapshot)
        return replace(message, tensor=tensor, delta=delta)

    def _apply(self, effect: Apply) -> None:
        changed = self.master.apply(effect.contributions)
        if changed:
            self._snapshot = self.master.theta.clone()
        self._ages.add(effect)
        if self._journal is not None:
            self._journal.write(Update.of(effect, time.monotonic() - self._began))
        self._positions = dict(self.machine.positions)  # of what is applied; next, more may come in
        if self._reached(1, sum(len(part.rows) for part in effect.contributions)):
            self.machine.finished = True  # no more weights, and no more updates
        after = self.machine.applied(time.monotonic())
        version = self.machine.version
        if self._directory and version % self._save_every == 0:
            self._save()
        self._on_update(version, self._snapshot)
        self._do(after)

    def _save(self) -> None:
        machine = self.machine
        assert self._directory is not None
        checkpoints.save(
            self._directory,
            checkpoints.Saved(
                self.master.theta.detach(),
                self.master.optimizer.state_dict(),
                machine.version,
                machine.next_member,
                self._positions,
                dict(machine.counters),
                self.layout.to_json(),
                self.buffers.value,
            ),
        )

    # --- connections ----------------------------------------------------------------------------------------------

    def _came(self, pair: Pair, hello: bytes) -> None:
        message, _, _ = decode(hello)
        if isinstance(message, Hello) and message.workers > 0:
            self._inbox.put(("came", pair, message))
        else:
            pair.close()

    def _open(self, member: int) -> None:
        row = self.machine.members[member]
        pair = self._coming.pop((row.node, row.instance), None)
        if pair is None:
            return
        inbox = self._inbox

        def deliver(message: Anything) -> None:
            if getattr(message, "member", None) != member:
                raise ValueError("a node speaks for another: its connection is closed")
            if isinstance(message, Buffers):
                inbox.put(("buffers", member, self.layout.buffers.read(message.tensor)))
                return
            if isinstance(message, Grad) and message.tensor is not None:
                message = replace(message, tensor=self._decode(message.tensor))
            inbox.put(("message", member, message))

        self._connections[member] = Connection(
            pair,
            channels=self.settings.channels,
            seconds=self.settings.lease_seconds,
            deliver=deliver,
            closed=lambda reason: inbox.put(("gone", member, reason)),
            announced=lambda seconds: inbox.put(("expect", member, seconds)),
        ).start()

    @staticmethod
    def _turn_away(who: Hello | Refuse, pair: Pair | None, reason: int = 0) -> None:
        """End the connection of a node that is no member, with a word why."""
        if pair is None:
            return
        if reason:
            with contextlib.suppress(PairError):
                pair.send_frame(encode(Refused(who.node, reason)))
        pair.close()

    def _decode(self, message: Tensor) -> Tensor:
        if self.settings.compress_up:
            codec = Codec(self.settings.compress_up, self.settings.density)
            return codec.decode(message, self.layout.numel, self.layout.dtype)
        dtype = torch.float64 if self.settings.deterministic else self.layout.dtype
        if message.numel() != self.layout.numel * dtype.itemsize:
            raise ValueError(f"a sum of {message.numel()} bytes does not fit this model")
        return message.view(dtype)

    def _forget(self, member: int) -> None:
        connection = self._connections.pop(member, None)
        self._differences.pop(member, None)
        if connection is not None:
            self._old = [old for old in self._old if not old.ended] + [connection]
            self._past[0] += connection.pair.received_bytes
            self._past[1] += connection.pair.sent_bytes
            connection.close()

    def status(self) -> Status:
        """What is going on, now."""
        wires = {number: c.pair for number, c in self._connections.items()}
        traffic = {number: (pair.received_bytes, pair.sent_bytes) for number, pair in wires.items()}
        return status_of(self.machine, self._ages, traffic, self._past, time.monotonic() - self._began)
