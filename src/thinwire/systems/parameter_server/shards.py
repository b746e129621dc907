"""Weights held by shard processes, as server and leaders use them: pieces of messages, who the shards are, updates.

The shard process itself is in ``shard``. Every vector is cut into the same slices, one per shard. The server's process
keeps the state machine and sends only frames; a leader sends one piece of each sum to each shard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.link.errors import PairError
from thinwire.systems.link.listener import Caller
from thinwire.systems.link.peer import SLOWEST, Peer
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.messages import (
    CODEC,
    LAST,
    NO_DIRECTORY,
    NO_INDEX,
    OTHER_OUTER,
    PROTOCOL,
    SHARD_PROTOCOL,
    SHARD_TAKEN,
    AddMember,
    Bye,
    DropSum,
    Grad,
    MemberLeft,
    Message,
    PieceArrived,
    Ping,
    Refused,
    RegisterShard,
    RemoveMember,
    SaveShard,
    SendWeights,
    ShardAccepted,
    ShardSaved,
    ShardUpdated,
    ShowWeights,
    Stop,
    SumOf,
    UpdateShard,
    Weights,
    encode,
)
from thinwire.systems.parameter_server.outer import recipe
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.status import ShardStatus

Event = tuple[str, Any, Any]
"""An entry of the server's queue: (what, who, value)."""
_Whole = list[tuple[Any, "list[Any] | None"]]
_Done = Callable[["Tensor | None"], None]
_MOST_OPEN = 1024

logger = logging.getLogger("thinwire")


class ShardLost(RuntimeError):
    """A shard has gone, and with it a part of the weights."""


class Assembly:
    """Holds a message, and those behind it, until all of its pieces have come; pieces may come before the message.

    Used on both sides: by the server for one member's sums, by a leader for the weights. It has no threads and no
    clock.

    Args:
        pieces: k, the pieces of a message.
        ordered: True: no message overtakes another (one channel). False: messages without pieces overtake those that
            wait for pieces, as control messages overtake tensors on two channels.

    Attributes:
        until: when the first waiting message must be complete, on the clock of ``now`` (seconds); None: none waits.
    """

    def __init__(self, pieces: int, ordered: bool) -> None:
        self._count, self._ordered = pieces, ordered
        self._queue: deque[tuple[Any, int | None, float]] = deque()
        self._pieces: dict[int, dict[int, Any]] = {}
        self._newest = -1
        self.until: float | None = None

    def message(self, message: Any, number: int | None, seconds: float, now: float) -> _Whole:
        """Note a message that has come.

        Args:
            number: of its pieces, higher than that of earlier messages; None: it has no pieces.
            seconds: the time its pieces may take once no message is before it.

        Returns:
            The messages that can be delivered now, each with its pieces in order, or with None if it has none.
        """
        if number is None and not self._ordered:
            return [(message, None)]
        self._queue.append((message, number, seconds))
        if len(self._queue) == 1:
            self.until = now + seconds
        return self._complete(now)

    def piece(self, number: int, index: int, piece: Any, now: float) -> _Whole:
        """Note a piece, which may come before its message; return what can be delivered, as :meth:`message` does.

        ``ValueError``: this piece came before, its index is out of range, or too many messages are incomplete.
        """
        held = self._pieces.setdefault(number, {})
        if number <= self._newest or index in held or not 0 <= index < self._count or len(self._pieces) > _MOST_OPEN:
            raise ValueError(f"piece {index} of message {number} arrived twice or unexpectedly")
        held[index] = piece
        return self._complete(now)

    def overdue(self, now: float) -> bool:
        """Return whether pieces have not come in time."""
        return self.until is not None and now > self.until

    def _complete(self, now: float) -> _Whole:
        out: _Whole = []
        while self._queue:
            message, number, _ = self._queue[0]
            if number is None:
                out.append((message, None))
            elif len(self._pieces.get(number, ())) == self._count:
                held = self._pieces.pop(number)
                out.append((message, [held[index] for index in range(self._count)]))
                self._newest = number
            else:
                break
            self._queue.popleft()
            self.until = now + self._queue[0][2] if self._queue else None
        return out


@dataclass(eq=False)
class ShardState:
    """What the server knows of a shard.

    Attributes:
        host, port: where leaders find it; an empty host means the server's own machine.
        ready: whether it has its weights.
        made, kept: the newest version that it holds, and the newest that it has written.
        slice: the weights that it was asked to show.
        traffic: member -> bytes from it and to it; past: the same for members that have gone.
    """

    index: int
    host: str
    port: int
    peer: Peer
    ready: bool = False
    made: int = -1
    kept: int = -1
    slice: Tensor | None = None
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)
    past: tuple[int, int] = (0, 0)


class ShardTable:
    """Accepts shards until all are there; from then on, losing one ends the training.

    Args:
        count: k, the number of shards.
        lease_seconds: a shard that is silent for so long counts as gone.
        outer: hash of the optimizer that every shard must have.
        keeps: whether every shard must have a directory for checkpoints.
        tell: puts an event into the server's queue: what ("shard" or "shard lost"), who, value.
        most_bytes: size of the largest tensor that a shard may send.
    """

    def __init__(
        self, count: int, lease_seconds: float, outer: int, keeps: bool, tell: Callable[[str, Any, Any], None], *,
        most_bytes: int,
    ) -> None:  # fmt: skip
        self.count, self._lease, self._outer, self._keeps, self._tell = count, lease_seconds, outer, keeps, tell
        self._most_bytes = most_bytes
        self.shards: dict[int, ShardState] = {}
        self.started = False
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="thinwire-server-beat", daemon=True)

    def register(self, peer: Peer, message: RegisterShard, answer: Callable[[int], ShardAccepted]) -> None:
        """Accept a shard that has connected, with ``answer`` of its index, or send it the reason for the refusal."""
        reason = self.objection(message)
        if reason:
            with contextlib.suppress(PairError):
                peer.send_frame(encode(Refused(message.index, reason)))
            peer.close()
            return
        host = "" if peer.host.startswith("127.") else peer.host
        shard = ShardState(message.index, host, message.port, peer)
        peer.start(
            CODEC,
            seconds=self._lease,
            most_bytes=self._most_bytes,
            deliver=lambda word: self._tell("shard", shard, word),
            closed=lambda why: self._tell("shard lost", shard, why),
        )
        peer.post(answer(message.index))
        self.shards[message.index] = shard
        if not self._beating.is_alive():
            self._beating.start()

    def objection(self, message: RegisterShard) -> int:
        """Return the reason for refusing this shard; 0 if it is accepted."""
        if message.protocol != PROTOCOL:
            return SHARD_PROTOCOL
        if not 0 <= message.index < self.count:
            return NO_INDEX
        if message.index in self.shards:
            return SHARD_TAKEN
        if message.outer != self._outer:
            return OTHER_OUTER
        return NO_DIRECTORY if self._keeps and not message.keeps else 0

    def has(self, shard: ShardState) -> bool:
        """Return whether this is still the current shard with its index."""
        return self.shards.get(shard.index) is shard

    def gone(self, shard: ShardState, reason: str, version: int, saved: int | None) -> None:
        """Note that a shard's connection ended at ``version``; ``saved``: version of the last checkpoint.

        ``ShardLost``: training has begun, so its part of the weights is lost.
        """
        if not self.has(shard):
            return
        if not self.started:
            del self.shards[shard.index]
            logger.warning("shard %d left before the start (%s): the server waits for it", shard.index, reason)
            return
        where = f"{shard.host}:{shard.port}" if shard.host else f"port {shard.port} of the server's machine"
        again = (
            "without --checkpoint-dir they start over"
            if saved is None
            else f"with the --checkpoint-dir directories that they had, they continue from version {saved}"
        )
        raise ShardLost(
            f"shard {shard.index} ({where}) has gone ({reason}), so training ends at version {version}: start the "
            f"server and its shards again; {again}"
        )

    def addresses(self) -> str:
        """Return the shards' addresses as text for the leaders, who recognise a shard by its certificate."""
        places = []
        for _, shard in sorted(self.shards.items()):
            shown = shard.peer.other.shown
            places.append([shard.host, shard.port, shown.fingerprint if shown else ""])
        return json.dumps({"count": self.count, "places": places})

    def post(self, message: Any) -> None:
        """Send a message to all shards."""
        for shard in list(self.shards.values()):
            shard.peer.post(message)

    def _beat(self) -> None:
        """Send signs of life, in a separate thread, so that the user's ``on_update`` does not look like silence."""
        while not self._over.wait(self._lease / 3):
            self.post(Ping())

    def close(self, version: int | None) -> None:
        """Let the shards go: training has ended at ``version``; None: they should wait for another server."""
        self._over.set()
        for shard in self.shards.values():
            if version is not None:
                shard.peer.post(Stop(0, version))
            shard.peer.finish()
        for shard in self.shards.values():
            shard.peer.join(2.0)

    def status(self) -> tuple[ShardStatus, ...]:
        """Return the status of each shard."""
        rows = []
        for index in range(self.count):
            shard = self.shards.get(index)
            bytes_of = [] if shard is None else [*shard.traffic.values(), shard.past]
            up, down = sum(row[0] for row in bytes_of), sum(row[1] for row in bytes_of)
            rows.append(ShardStatus(index, shard is not None and shard.ready, up, down))
        return tuple(rows)


class ShardedWeights:
    """As :class:`outer.LocalWeights`, for weights held by k shard processes.

    A sum counts as arrived when its header and all k pieces are there; an update is made when all shards have made it.

    Args:
        table: the shards.
        machine: the server's state machine.
        theta: initial weights, ``[D]``; None: each shard continues from its checkpoint.
        run: number of the training.
        full: number of gradients of a whole round, for ``lr_scale``.
        ready: called with the shards' addresses when all are there.
        failed: called with the reason when a checkpoint could not be written.

    Attributes:
        saved_version: of the last checkpoint that all shards and the server have written.
        lost: whether a shard has gone.
    """

    def __init__(
        self, table: ShardTable, layout: Layout, settings: Settings, machine: Server, theta: Tensor | None, *, run: int,
        full: int, ready: Callable[[str], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.table, self.pieces = table, slices(layout.numel, table.count)
        self._dtype, self._settings, self._machine = layout.dtype, settings, machine
        self._theta, self._run, self._full, self._ready, self._failed = theta, run, full, ready, failed
        item = 8 if settings.deterministic else layout.dtype.itemsize
        self._seconds = settings.lease_seconds + layout.numel * item / SLOWEST
        self._assemblies: dict[int, Assembly] = {}
        self._making: tuple[int, bool, _Done] | None = None
        self._late_at = math.inf
        self._saving: tuple[str | Path, checkpoints.Saved] | None = None
        self.saved_version = None if theta is not None else machine.version
        self.lost = False

    # --- messages from shards -------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all weights are there, so that nodes may join and training may end."""
        return self.table.started

    def on_event(self, event: Event, now: float) -> Iterable[Message]:
        """Handle a shard that has come, sends a message, or has gone; return messages for the state machine.

        ``ShardLost``: the shard held a part of the weights.
        """
        what, who, value = event
        try:
            if what == "shard":
                return self._on(who, value, now)
            if what == "register":
                self.table.register(who, value, self._answer)
            elif what == "shard lost":
                self.table.gone(who, value, self._machine.version, self.saved_version)
        except ShardLost:
            self.lost = True
            raise
        return ()

    def _answer(self, index: int) -> ShardAccepted:
        """Return the first message to a shard."""
        tensor = None if self._theta is None else self._theta[self.pieces[index]]
        return ShardAccepted(self._machine.version, self._run, tensor)

    def _on(self, shard: ShardState, message: Any, now: float) -> Iterable[Message]:
        if not self.table.has(shard):
            return ()
        if isinstance(message, ShardUpdated):
            self._updated(shard, message)
        elif isinstance(message, ShardSaved):
            self._saved(shard, message)
        elif isinstance(message, PieceArrived):
            shard.traffic[message.member] = message.up, message.down
            return self._arrived(shard, message, now)
        elif isinstance(message, MemberLeft):
            shard.traffic.pop(message.member, None)
            shard.past = shard.past[0] + message.up, shard.past[1] + message.down
            return (Bye(message.member),)
        return ()

    def _updated(self, shard: ShardState, message: ShardUpdated) -> None:
        piece = self.pieces[shard.index]
        if message.tensor is not None and message.tensor.numel() != (piece.stop - piece.start) * self._dtype.itemsize:
            shard.peer.close()
            why = f"it sent {message.tensor.numel()} bytes instead of its slice"
            self.table.gone(shard, why, self._machine.version, self.saved_version)
            return
        shard.made = message.version
        if message.tensor is not None:
            shard.slice = message.tensor.view(self._dtype)
        shards = self.table.shards.values()
        if not shard.ready:
            shard.ready = True
            if len(shards) == self.table.count and all(other.ready for other in shards):
                self.table.started = True
                self._theta = None
                self._ready(self.table.addresses())
        elif self._making is not None and min(other.made for other in shards) >= self._making[0]:
            (_, show, done), self._making, self._late_at = self._making, None, math.inf
            done(self._whole() if show else None)

    def _arrived(self, shard: ShardState, message: PieceArrived, now: float) -> Iterable[Message]:
        assembly = self._assemblies.get(message.member)
        if assembly is None:
            return ()
        try:
            ready = assembly.piece(message.seq, shard.index, None, now)
        except ValueError:  # a leader of ours never sends a piece twice, or so many pieces
            return (Bye(message.member),)
        return self._named(message.member, ready, now)

    def _whole(self) -> Tensor | None:
        """Return the weights, or None until all shards have sent their slices."""
        parts = [self.table.shards[index].slice for index in range(len(self.pieces))]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        """Wait for the final weights and return them, ``[D]``. ``ShardLost``: a shard does not answer."""
        self._ask(ShowWeights(self._machine.version))
        self._wait(lambda: self._whole() is not None, next_event)
        theta = self._whole()
        assert theta is not None
        return theta

    def _wait(self, until: Callable[[], bool], next_event: Callable[[], Event | None]) -> None:
        """Handle messages from shards only, until ``until()`` is true."""
        end = time.monotonic() + self._seconds
        while not until():
            now = time.monotonic()
            if now > end:
                self.lost = True
                raise ShardLost(f"the shards were silent for {self._seconds:.0f} s: restart the server and its shards")
            event = next_event()
            if event is not None:
                tuple(self.on_event(event, now))

    def _ask(self, message: ShowWeights | UpdateShard) -> None:
        for shard in self.table.shards.values():
            shard.slice = None
        self.table.post(message)

    # --- members --------------------------------------------------------------------------------------------------

    def read(self, message: Grad) -> Grad:
        """Check a sum's header; called in the peer's thread."""
        if message.tensor is not None:
            raise ValueError("a sum was sent to the server instead of its shards: its connection is closed")
        return message

    def on_message(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """Take a member's message; return the messages that are now complete, it or earlier ones.

        The tensor of a sum becomes its name on the shards, (member, seq).
        """
        assembly = self._assemblies.get(member)
        if assembly is None:
            return (message,)
        number = message.seq if isinstance(message, Grad) and message.rows else None
        return self._named(member, assembly.message(message, number, self._seconds, now), now)

    def _named(self, member: int, ready: _Whole, now: float) -> list[Message]:
        until = self._assemblies[member].until
        if until is not None:
            self._machine.expect(member, until - now, now)
        return [m if pieces is None else replace(m, tensor=(member, m.seq)) for m, pieces in ready]

    def attach_payload(self, member: int, message: Message) -> Message:
        """Let the shards send the weights that belong to a message; return the message."""
        if isinstance(message, Weights) and not message.same:
            self.table.post(SendWeights(member, message.grant))
        elif isinstance(message, Stop):
            self.table.post(SendWeights(member, LAST))
        return message

    def add_member(self, member: int, ticket: int) -> None:
        """Note a new member."""
        self._assemblies[member] = Assembly(len(self.pieces), self._settings.channels == 1)
        self.table.post(AddMember(member, ticket))

    def forget(self, member: int) -> None:
        """Note that a member has gone. Its sums that have arrived and wait for an update are kept for it."""
        if self._assemblies.pop(member, None) is None:
            return
        parts = [] if self._machine.finished else self._machine.arrived
        kept = tuple(SumOf(member, p.tensor[1]) for p in parts if p.member == member and p.tensor is not None)
        self.table.post(RemoveMember(member, kept))

    def overdue(self, now: float) -> list[int]:
        """Return the members whose sums are overdue. Called several times per lease.

        An update may take long, so a shard that lives is named, and not given up.
        """
        if self._making is not None and now > self._late_at:
            self._late_at, version = math.inf, self._making[0]
            late = ", ".join(f"shard {i}" for i, shard in sorted(self.table.shards.items()) if shard.made < version)
            logger.warning("no version %d from %s after %.0f s, despite signs of life", version, late, self._seconds)
        return [member for member, assembly in self._assemblies.items() if assembly.overdue(now)]

    def traffic(self, member: int) -> tuple[int, int]:
        """Return the bytes from and to a member at all shards."""
        rows = [shard.traffic.get(member, (0, 0)) for shard in list(self.table.shards.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    @property
    def past(self) -> tuple[int, int]:
        """The same bytes, summed over members that have gone."""
        rows = [shard.past for shard in list(self.table.shards.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    # --- updates and checkpoints ----------------------------------------------------------------------------------

    def drop(self, tensor: Any) -> None:
        """Free a sum that will not be used."""
        self.table.post(DropSum(*tensor))

    def apply(self, effect: Apply, show: bool, done: _Done) -> None:
        """Let all shards make an update; ``done`` is called when they have, with the weights if ``show``."""
        made = recipe(effect.contributions, self._settings, self._full)
        for part in effect.contributions:
            if part.tensor is not None and part.weight <= 0:
                self.drop(part.tensor)
        parts = made.parts if made is not None else ()
        rows = tuple(SumOf(part.member, part.tensor[1], part.scale) for part in parts)
        divisor, factor = (made.divisor, made.factor) if made is not None else (1.0, 1.0)
        self._making, self._late_at = (effect.version + 1, show, done), time.monotonic() + self._seconds
        self._ask(UpdateShard(effect.version, divisor, factor, show, rows))

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        """Let the shards write their parts, then write the server's own, while training continues.

        Only one checkpoint is written at a time: a shard keeps two, and one of them must match the server's newest.
        """
        if self._saving is None and not self.lost:
            self._saving = directory, replace(saved, shards=len(self.pieces), run=self._run)
            self.table.post(SaveShard(saved.version, -1 if self.saved_version is None else self.saved_version))

    def _saved(self, shard: ShardState, message: ShardSaved) -> None:
        """Note that a shard has written its part, or failed to; after the last one, write the server's own."""
        if self._saving is None or message.version != self._saving[1].version:
            return
        if message.failed:
            self._saving = None
            self._failed(f"shard {shard.index} could not write its checkpoint of version {message.version}")
            return
        shard.kept = message.version
        if any(other.kept != message.version for other in self.table.shards.values()):
            return
        (directory, saved), self._saving = self._saving, None
        try:
            checkpoints.save(directory, saved)
            self.saved_version = saved.version
        except OSError as error:
            self._failed(str(error))

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        """Wait until no checkpoint is being written."""
        if not self.lost:
            self._wait(lambda: self._saving is None, next_event)


def shard_count(caller: Caller) -> int:
    """Return how many shards a server has or waits for."""
    return int(json.loads(caller.note("shards"))["count"])
