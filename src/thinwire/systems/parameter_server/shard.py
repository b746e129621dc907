"""A shard process: a slice of the weights with its optimizer, its connections to the leaders and its checkpoints.

It decides nothing: the server says what to add and when, see ``shards``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.systems.link.actor import Actor, Over, find
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity, Trust, find_trust, is_loopback
from thinwire.systems.link.listener import Caller, Listener, split_address
from thinwire.systems.link.peer import Peer
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import ServerEnd, most_bytes
from thinwire.systems.parameter_server.errors import ServerLost, ShardRefused
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.outer import FlatWeights, Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shards import shard_count

_FIRST_SECONDS = 60.0
_LATE_SECONDS = 2.0  # a busy server may notice the end of a lease so much later

logger = logging.getLogger("thinwire")


class WeightSlice:
    """Shard ``index`` of ``count`` without sockets. ``version`` -1: no weights yet. ``held``: sums by (member, seq)."""

    weights: FlatWeights

    def __init__(
        self, settings: Settings, layout: Layout, outer: Outer, index: int, count: int,
        checkpoint_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.layout, self.outer, self.version = settings, layout, outer, -1
        self._index, self._count, self._directory, self._run = index, count, checkpoint_dir, 0
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
                self.weights.step(terms, message.gradients)
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
        self.weights = FlatWeights(theta, self.outer, self.settings)
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
class LeaderPlace:
    """One leader's connection. ``member``: 0 until the server admits it. ``newest``: number of its last piece."""

    ticket: int
    peer: Peer
    member: int = 0
    newest: int = -1

    def left(self) -> msg.MemberLeft:
        return msg.MemberLeft(self.member, self.peer.received_bytes, self.peer.sent_bytes)


class ShardDriver(Actor):
    """A shard between the server, which decides, and the leaders, which bring sums and take weights.

    ``slice`` None: it has not found the server yet. ``version``: of the final weights, once it has ended.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.slice: WeightSlice | None = None
        self.version: int | None = None
        self._up: Peer | None = None
        self._waiting: dict[int, LeaderPlace] = {}  # by ticket
        self._members: dict[int, LeaderPlace] = {}

    @property
    def lease(self) -> float:
        return 10.0 if self.slice is None else self.slice.settings.lease_seconds

    def take(self, peer: Peer, ticket: int) -> None:
        """Note that a leader has connected. It may stay silent: the server knows whether it lives."""
        leader, own = LeaderPlace(ticket, peer), self.slice
        self.tell("came", leader)  # first, so that it is known when the server admits the ticket

        def deliver(message: Any) -> None:
            if not isinstance(message, msg.Piece) or message.tensor is None:
                raise ValueError("a leader sends a shard something other than pieces: its connection is closed")
            if not leader.member or message.member != leader.member or message.number <= leader.newest:
                raise ValueError("a leader sends another leader's piece, or one twice: its connection is closed")
            leader.newest = message.number
            self.tell("piece", leader, message)

        peer.start(
            msg.CODEC,
            seconds=self.lease,
            most_bytes=0 if own is None else most_bytes(own.settings, own.layout),
            silent=True,
            deliver=deliver,
            closed=partial(self.tell, "left", leader),
        )
        peer.post(msg.Ping())

    def begin(self, up: Peer, own: WeightSlice) -> None:
        """Serve the server at the other end of a connection."""
        self.slice, self._up = own, up
        up.start(
            msg.CODEC,
            seconds=self.lease,
            most_bytes=most_bytes(own.settings, own.layout),
            deliver=partial(self.tell, "server", up),
            closed=partial(self.tell, "lost", up),
            beat=msg.Ping(),
        )

    def handle(self, what: str, who: Any, value: Any) -> None:
        up, own = self._up, self.slice
        if what == "closed":
            self.version = -1 if own is None else own.version
        elif what == "came":
            self._waiting[who.ticket] = who
        elif up is None or own is None:
            return
        elif what in ("left", "piece"):
            for answer in self._from_leader(who, value if what == "piece" else None, own):
                up.post(answer)
        elif who is up and what == "lost":
            self._leave()
        elif who is up:
            for answer in self._from_server(value, own):
                up.post(answer)

    def _from_leader(self, leader: LeaderPlace, piece: msg.Piece | None, own: WeightSlice) -> list[Any]:
        """Take a piece of a sum; None: the leader has gone."""
        if piece is None:
            self._waiting.pop(leader.ticket, None)
        if self._members.get(leader.member) is not leader:
            return []
        try:
            if piece is not None:
                own.add(piece.member, piece.number, piece.tensor)
                up, down = leader.peer.received_bytes, leader.peer.sent_bytes
                return [msg.PieceArrived(leader.member, piece.number, up, down)]
        except ValueError:
            pass
        return self._remove(leader.member)

    def _from_server(self, message: Any, own: WeightSlice) -> list[Any]:
        if isinstance(message, msg.Stop):
            self.version = own.version
        elif isinstance(message, msg.AddMember):
            leader = self._waiting.pop(message.ticket, None)
            if leader is None:  # it has already gone
                return [msg.MemberLeft(message.member, 0, 0)]
            leader.member = message.member
            self._members[message.member] = leader
        elif isinstance(message, msg.SendWeights) and (there := self._members.get(message.member)) is not None:
            there.peer.post(own.piece(message.member, message.number))
        return [*own.on(message), *(self._remove(message.member) if isinstance(message, msg.RemoveMember) else ())]

    def _remove(self, member: int) -> list[Any]:
        leader = self._members.pop(member, None)
        if leader is None:
            return []
        self.retire(leader.peer)
        return [leader.left()]

    def _leave(self) -> None:
        """Wait for another server, without the leaders of this one."""
        if self._up is not None:
            self.retire(self._up)
        self._up = None
        self.retire(*(leader.peer for leader in (*self._members.values(), *self._waiting.values())))
        self._members, self._waiting = {}, {}


class Shard(ShardDriver):
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
        super().__init__(index)
        there, _ = split_address(server)
        if checkpoint_dir is not None:
            checkpoints.prepare(checkpoint_dir)
        self.server, self._host = server, host
        self._outer, self._read_outer, self._directory, self._leases = outer, read_outer, checkpoint_dir, leases
        self._taken_at: float | None = None
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
        known = False
        try:
            while self.version is None:
                if self._up is None:
                    self._register(known)
                    known = True
                elif (event := self.next_event(None)) is not None:
                    self.handle(*event)
            if self._up is not None and not self._over.is_set():
                self.retire(self._up, finish=True)
                self.join(2.0)
            return self.version
        except Over:
            return -1 if self.slice is None else self.slice.version
        finally:
            self.close()
            self._leave()
            self.join(2.0)

    def close(self) -> None:
        """Let ``run`` end; may be called from any thread."""
        self._over.set()
        self.tell("closed")
        self._listener.close()

    def _register(self, known: bool) -> None:
        """Connect to the server, waiting for it if necessary."""
        patience = self._leases * self.lease if known else _FIRST_SECONDS
        try:
            up, own = find(self._reach, patience, min(0.5, self.lease / 4), self._over, known)
        except NotAdmitted as error:
            raise ShardRefused(str(error)) from error
        except PairError as error:
            advice = "" if known else ": start `thinwire ps server --shards K` there, or correct the address"
            raise ServerLost(f"no server at {self.server} for {patience:g} s: {error}{advice}") from error
        self.begin(up, own)

    def _reach(self) -> tuple[Peer, WeightSlice]:
        caller = Caller(self.server, self._identity, min(10.0, 2 * self.lease), self._source)
        own = self._slice_for(caller)
        keeps, number = self._directory is not None, fingerprint(own.outer, own.layout.dtype)
        hello = msg.RegisterShard(self.index, self._listener.port, msg.PROTOCOL, keeps, number)
        return caller.connect(msg.encode(hello)), own

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
        settings, nodes = Settings.from_json(caller.note("settings")), int(caller.note("nodes"))
        outer = self._outer or (self._read_outer(caller.note("outer")) if self._read_outer else None)
        layout = Layout.from_json(caller.note("layout"))
        outer = outer or default_outer(settings, nodes)
        return WeightSlice(settings, layout, outer, self.index, count, self._directory)

    def _from_server(self, message: Any, own: WeightSlice) -> list[Any]:
        if not isinstance(message, msg.Refused):
            self._taken_at = None
            return super()._from_server(message, own)
        text, now = msg.SHARD_REASONS.get(message.reason, msg.SHARD_REASONS[msg.NO_INDEX]), self.clock()
        self._taken_at = self._taken_at or now
        if message.reason != msg.SHARD_TAKEN or now - self._taken_at > self.lease + _LATE_SECONDS:
            raise ShardRefused(text.format(index=self.index))
        self._leave()
        # the shard with this index may be dead: the server knows when its lease has ended
        self._over.wait(min(0.5, self.lease / 4))
        return []

    def _came(self, peer: Peer, first: bytes) -> None:
        message, _, _ = msg.decode(first)
        if isinstance(message, msg.Ticket) and message.number > 0:
            self.take(peer, message.number)
        else:
            raise ValueError("it does not begin as a node does")
