"""A shard process: a slice of the weights with its optimizer, its connections to the leaders and its checkpoints.

It decides nothing: the server says what to add and when, see ``shards``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity, Trust, find_trust, is_loopback
from thinwire.systems.link.listener import Caller, Listener, split_address
from thinwire.systems.link.peer import Peer, join_all, unended
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import ServerEnd, most_bytes
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.outer import FlatWeights, Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import shard_count
from thinwire.systems.parameter_server.worker import ServerLost

_FIRST_SECONDS = 60.0
_LATE_SECONDS = 2.0  # a busy server may notice the end of a lease so much later

logger = logging.getLogger("thinwire")


class ShardRefused(RuntimeError):
    """The server refuses this shard."""


class WeightSlice:
    """Shard ``index`` of ``count`` without sockets. ``version`` -1: no weights yet. ``held``: sums by (member, seq)."""

    weights: FlatWeights

    def __init__(
        self, settings: Settings, layout: Layout, outer: Outer, index: int, count: int, full: int,
        checkpoint_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.layout, self.outer, self.version = settings, layout, outer, -1
        self._index, self._count, self._full, self._directory, self._run = index, count, full, checkpoint_dir, 0
        piece = slices(layout.numel, count)[index]
        self._numel = piece.stop - piece.start
        self._end = ServerEnd(settings, self._numel, layout.dtype)
        self.held: dict[tuple[int, int], Tensor] = {}

    def on(self, message: Any) -> list[Any]:
        if isinstance(message, msg.ShardAccepted):
            self._begin(message)
            return [msg.ShardUpdated(self.version)]
        if isinstance(message, msg.UpdateShard):
            terms = [(self.held.pop((term.member, term.seq)), term.scale) for term in message.rows]
            if terms:
                self.weights.step(terms, message.divisor, message.factor)
            self.version = message.version + 1
            return [msg.ShardUpdated(self.version, self.weights.snapshot if message.show else None)]
        if isinstance(message, msg.ShowWeights):
            return [msg.ShardUpdated(self.version, self.weights.snapshot)]
        if isinstance(message, msg.SaveShard):
            return [msg.ShardSaved(self.version, failed=not self._save(message.whole))]
        if isinstance(message, msg.DropSum):
            self.held.pop((message.member, message.seq), None)
        elif isinstance(message, msg.RemoveMember):
            kept = {(term.member, term.seq) for term in message.rows}
            self.held = {name: x for name, x in self.held.items() if name[0] != message.member or name in kept}
            self._end.forget(message.member)
        return []

    def _begin(self, message: msg.ShardAccepted) -> None:
        self.version, self._run = message.version, message.run
        if message.tensor is not None:
            if self._directory is not None and checkpoints.kept_in(self._directory, self._index).found():
                raise ValueError(
                    f"{self._directory} has checkpoints of shard {self._index} but the server starts over: give an "
                    "empty directory, or give the server the --checkpoint-dir that it had"
                )
            theta, optimizer = message.tensor.view(self.layout.dtype), None
        else:
            if self._directory is None:
                raise ValueError(f"the server resumes from a checkpoint: give shard {self._index} its --checkpoint-dir")
            saved = checkpoints.load_slice(self._directory, message.version, self._index, self._count, message.run)
            if saved.layout != self.layout.to_json():
                self.layout.check(Layout.from_json(saved.layout))
            theta, optimizer = saved.theta, saved.optimizer
        if theta.numel() != self._numel:
            raise ValueError(f"{theta.numel()} elements arrived, shard {self._index} has {self._numel}")
        self.weights = FlatWeights(theta, self.outer, self.settings, self._full)
        if optimizer is not None:
            self.weights.restore(theta, optimizer)

    def _save(self, whole: int) -> bool:
        assert self._directory is not None
        saved = checkpoints.Saved(
            self.weights.theta.detach(), self.weights.optimizer.state_dict(), self.version, 0, {}, {},
            self.layout.to_json(), None, self._count, self._index, self._run,
        )  # fmt: skip
        try:
            checkpoints.save(self._directory, saved, whole if whole >= 0 else None)
        except (OSError, ValueError) as error:
            logger.warning("%s", error)
            return False
        return True

    def add(self, member: int, seq: int, message: Tensor) -> None:
        self.held[member, seq] = self._end.sum(message)

    def piece(self, member: int, number: int) -> msg.Piece:
        """Return the current weights for a member; the final ones are not compressed."""
        if number == msg.LAST:
            return msg.Piece(member, number, False, self.weights.snapshot)
        tensor, delta = self._end.weights(member, self.weights.snapshot)
        return msg.Piece(member, number, delta, tensor)


@dataclass(eq=False)
class _Leader:
    """One leader's connection. ``member``: 0 until the server admits it. ``newest``: number of its last piece."""

    ticket: int
    peer: Peer
    member: int = 0
    newest: int = -1

    def left(self) -> msg.MemberLeft:
        return msg.MemberLeft(self.member, self.peer.received_bytes, self.peer.sent_bytes)


class Leaders:
    """The leaders at a shard. ``came`` may be called from any thread, all else from the shard's."""

    def __init__(self, tell: Callable[[str, Any, Any], None]) -> None:
        self._tell = tell
        self._waiting: dict[int, _Leader] = {}  # by ticket
        self._members: dict[int, _Leader] = {}
        self._old: list[Peer] = []
        self.seconds, self.most_bytes = 10.0, 0

    def came(self, peer: Peer, ticket: int) -> None:
        """Note that a leader has connected. It may stay silent: the server knows whether it lives."""
        leader = _Leader(ticket, peer)
        self._tell("came", leader, None)  # first, so that it is known when the server admits the ticket
        peer.start(
            msg.CODEC,
            seconds=self.seconds,
            most_bytes=self.most_bytes,
            silent=True,
            deliver=lambda message: self._deliver(leader, message),
            closed=lambda reason: self._tell("left", leader, reason),
        )
        peer.post(msg.Ping())

    def _deliver(self, leader: _Leader, message: Any) -> None:
        """Check and forward a piece. Called in the peer's thread."""
        if not isinstance(message, msg.Piece) or message.tensor is None:
            raise ValueError("a leader sends a shard something other than pieces: its connection is closed")
        if not leader.member or message.member != leader.member or message.number <= leader.newest:
            raise ValueError("a leader sends another leader's piece, or one twice: its connection is closed")
        leader.newest = message.number
        self._tell("piece", leader, message)

    def on(self, what: str, leader: _Leader, message: Any, weights: WeightSlice) -> list[Any]:
        if what == "came":
            self._waiting[leader.ticket] = leader
        elif what == "left":
            self._waiting.pop(leader.ticket, None)
            if self._members.get(leader.member) is leader:
                del self._members[leader.member]
                return [leader.left()]
        elif self._members.get(leader.member) is leader:
            try:
                weights.add(message.member, message.number, message.tensor)
            except ValueError:
                return self._remove(leader.member)
            return [msg.PieceArrived(leader.member, message.number, leader.peer.received_bytes, leader.peer.sent_bytes)]
        return []

    def on_server_message(self, message: Any, weights: WeightSlice) -> list[Any]:
        if isinstance(message, msg.AddMember):
            leader = self._waiting.pop(message.ticket, None)
            if leader is None:  # it has already gone
                return [msg.MemberLeft(message.member, 0, 0)]
            leader.member = message.member
            self._members[message.member] = leader
        elif isinstance(message, msg.RemoveMember):
            return self._remove(message.member)
        elif isinstance(message, msg.SendWeights):
            there = self._members.get(message.member)
            if there is not None:
                there.peer.post(weights.piece(message.member, message.number))
        return []

    def _remove(self, member: int) -> list[Any]:
        leader = self._members.pop(member, None)
        if leader is None:
            return []
        leader.peer.close()
        self._old = unended(self._old, leader.peer)
        return [leader.left()]

    def close(self, seconds: float) -> None:
        there = [leader.peer for leader in (*self._members.values(), *self._waiting.values())]
        self._members, self._waiting = {}, {}
        for peer in there:
            peer.close()
        self._old = unended(self._old, *there)
        join_all(self._old, seconds)


class Shard(AbstractContextManager["Shard"]):
    """Holds slice ``index`` of a served model's weights.

    If the server dies, a shard waits for the next server at the same address, as nodes do.

    Args:
        read_outer: makes ``outer``, if that is not given, from the text that the server publishes (``outer_text``).
        host: as for :func:`serve_shard`. Connections to the server also start from it, because leaders are sent to the
            address from which the shard connected.
        server, index, outer, checkpoint_dir, port: as for :func:`serve_shard`.
        trust: as for :class:`Service`; the server's secret, or keys of the same authority.
        leases: give up after that many leases without a server.

    Raises:
        ValueError: the address or the directory is invalid.
    """

    def __init__(
        self,
        server: str,
        index: int,
        *,
        outer: Outer | None = None,
        read_outer: Callable[[str], Outer | None] | None = None,
        checkpoint_dir: str | Path | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        trust: Trust = None,
        leases: float = 6.0,
    ) -> None:
        there, _ = split_address(server)
        if checkpoint_dir is not None:
            checkpoints.prepare(checkpoint_dir)
        self.server, self.index, self._host = server, index, host
        self._outer, self._read_outer, self._directory, self._leases = outer, read_outer, checkpoint_dir, leases
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._up: Peer | None = None
        self._taken_at: float | None = None
        self.slice: WeightSlice | None = None
        self.leaders = Leaders(self._tell)
        self._over = threading.Event()
        self._identity = PeerIdentity("shard", index, trust or find_trust())
        anywhere = host in ("", "0.0.0.0", "::") or (is_loopback(host) and not is_loopback(there))
        self._source = None if anywhere else host
        self._listener = Listener(port, host, roles=("node",), trust=self._identity.trust)
        self._listener.serve(self._came, FRAME.size)

    def run(self) -> int:
        """Serve until the end of the training. Return the version of the final weights.

        If ``close`` is called meanwhile, from any thread, return the version that this shard holds; -1: it has none.

        Raises:
            ServerLost: the server has gone and did not come back.
            ShardRefused: the server refuses this shard.
            ValueError: the server has no such shard, its nodes could not reach this one, or the checkpoint to continue
                from is missing.
        """
        threading.Thread(target=self._beat, name="thinwire-shard-beat", daemon=True).start()
        found = False
        try:
            while up := self._register(found):
                found = True
                version = self._serve(up)
                if version is not None:
                    return version
                up.join(2.0)
            return -1 if self.slice is None else self.slice.version
        finally:
            self.close()

    def close(self) -> None:
        self._over.set()
        self._tell("closed", None, None)
        self._listener.close()
        if self._up is not None:
            self._up.close()
            self._up.join(2.0)
        self.leaders.close(2.0)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _tell(self, what: str, who: Any, value: Any) -> None:
        self._inbox.put((what, who, value))

    def _register(self, known: bool) -> Peer | None:
        """Connect to the server, waiting for it if necessary; None: this shard was closed meanwhile."""
        since = time.monotonic()
        lease = 10.0 if self.slice is None else self.slice.settings.lease_seconds
        patience = self._leases * lease if known else _FIRST_SECONDS
        while not self._over.is_set():
            try:
                caller = Caller(self.server, self._identity, min(10.0, 2 * lease), self._source)
                own = self._slice_for(caller)
                keeps, number = self._directory is not None, fingerprint(own.outer, own.layout.dtype)
                hello = msg.RegisterShard(self.index, self._listener.port, msg.PROTOCOL, keeps, number)
                up = caller.connect(msg.encode(hello))
                break
            except PairError as error:
                if isinstance(error, NotAdmitted) and not known:  # later, another program may have the port
                    raise ShardRefused(str(error)) from error
                if time.monotonic() - since > patience:
                    advice = "" if known else ": start `thinwire ps server --shards K` there, or correct the address"
                    raise ServerLost(f"no server at {self.server} for {patience:g} s: {error}{advice}") from error
                self._over.wait(min(0.5, lease / 4))
        else:
            return None
        self.slice, self._up, lease = own, up, own.settings.lease_seconds
        most = most_bytes(own.settings, own.layout)
        self.leaders.seconds, self.leaders.most_bytes = lease, most
        up.start(
            msg.CODEC,
            seconds=lease,
            most_bytes=most,
            deliver=lambda message: self._tell("word", up, message),
            closed=lambda reason: self._tell("lost", up, reason),
        )
        return up

    def _slice_for(self, caller: Caller) -> WeightSlice:
        if is_loopback(self._host) and not is_loopback(caller.found_at):
            raise ValueError(
                f"nodes of the server at {self.server} could not reach this shard at {self._host}: give it --host, or "
                "host=, with this machine's address in that network"
            )
        count = shard_count(caller)
        if not count:
            raise ValueError(f"the server at {self.server} holds its weights whole: start it with --shards")
        if not 0 <= self.index < count:
            raise ValueError(f"{msg.SHARD_REASONS[msg.NO_INDEX].format(index=self.index)}: it has 0 to {count - 1}")
        settings, full = Settings.from_json(caller.note("settings")), int(caller.note("nodes"))
        outer = self._outer or (self._read_outer(caller.note("outer")) if self._read_outer else None)
        layout = Layout.from_json(caller.note("layout"))
        outer = outer or default_outer(settings, full)
        return WeightSlice(settings, layout, outer, self.index, count, full, self._directory)

    def _beat(self) -> None:
        """Send signs of life, in a separate thread, so that an optimizer step does not look like silence."""
        while not self._over.wait(0.1 if self.slice is None else self.slice.settings.lease_seconds / 3):
            if self._up is not None:
                self._up.post(msg.Ping())

    def _serve(self, up: Peer) -> int | None:
        """Serve one connection until training or this shard has ended (the version), or the server has gone (None)."""
        assert self.slice is not None
        own, leaders = self.slice, self.leaders
        while True:
            what, who, value = self._inbox.get()
            if what == "closed":
                return own.version
            if what not in ("word", "lost"):
                answers = leaders.on(what, who, value, own)
            elif who is not up:
                continue  # it belongs to an earlier server
            elif what == "lost":
                leaders.close(0.0)
                return None
            elif isinstance(value, msg.Stop):
                up.finish()
                up.join(2.0)
                return own.version
            elif isinstance(value, msg.Refused):
                text = msg.SHARD_REASONS.get(value.reason, msg.SHARD_REASONS[msg.NO_INDEX])
                lease = own.settings.lease_seconds
                self._taken_at = self._taken_at or time.monotonic()
                if value.reason != msg.SHARD_TAKEN or time.monotonic() - self._taken_at > lease + _LATE_SECONDS:
                    raise ShardRefused(text.format(index=self.index))
                up.close()
                # the shard with this index may be dead: the server knows when its lease has ended
                self._over.wait(min(0.5, lease / 4))
                return None
            else:
                self._taken_at = None
                answers = [*own.on(value), *leaders.on_server_message(value, own)]
            for answer in answers:
                up.post(answer)

    def _came(self, peer: Peer, first: bytes) -> None:
        message, _, _ = msg.decode(first)
        if isinstance(message, msg.Ticket) and message.number > 0:
            self.leaders.came(peer, message.number)
        else:
            raise ValueError("it does not begin as a node does")
