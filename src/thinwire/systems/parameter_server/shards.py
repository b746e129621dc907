"""Weights held by shard processes, as server and leaders use them: pieces of messages, who the shards are, updates.

Every vector is cut into the same slices, one per ``shard``. The server sends only frames; leaders send the pieces.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.errors import PairError
from thinwire.systems.link.actor import Event
from thinwire.systems.link.listener import Caller
from thinwire.systems.link.peer import Peer, allowance
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.compress import most_bytes
from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.errors import ShardLost
from thinwire.systems.parameter_server.layout import Layout, slices
from thinwire.systems.parameter_server.outer import usable
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.status import ShardStatus

_Whole = list[tuple[Any, "list[Any] | None"]]
_Done = Callable[["Tensor | None"], None]
_MOST_OPEN = 1024
_REFUSAL_SECONDS = 1.0

logger = logging.getLogger("thinwire")


class Assembly:
    """Holds a message, and those behind it, until all of its ``pieces`` have come, which may be before it.

    For one member's sums at the server, and for the weights at a leader. Unless ``ordered`` (one channel), messages
    without pieces overtake those that wait. ``until``: when the first waiting one must be complete; None: none waits.
    """

    def __init__(self, pieces: int, ordered: bool) -> None:
        self._count, self._ordered = pieces, ordered
        self._queue: deque[tuple[Any, int | None, float]] = deque()
        self._pieces: dict[int, dict[int, Any]] = {}
        self._newest = -1
        self.until: float | None = None

    def message(self, message: Any, number: int | None, seconds: float, now: float) -> _Whole:
        """Note a message; return those that can be delivered now, each with its pieces in order, or None.

        ``number``: of its pieces, rising; None: it has none. ``seconds``: for them once no message is before it.
        """
        if number is None and not self._ordered:
            return [(message, None)]
        self._queue.append((message, number, seconds))
        if len(self._queue) == 1:
            self.until = now + seconds
        return self._complete(now)

    def piece(self, number: int, index: int, piece: Any, now: float) -> _Whole:
        """Note a piece, which may come before its message; return what can be delivered, as :meth:`message` does."""
        held = self._pieces.setdefault(number, {})
        if number <= self._newest or index in held or not 0 <= index < self._count or len(self._pieces) > _MOST_OPEN:
            raise ValueError(f"piece {index} of message {number} arrived twice or unexpectedly")
        held[index] = piece
        return self._complete(now)

    def overdue(self, now: float) -> bool:
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
    """What the server knows of a shard; ``host`` empty: the server's machine. ``traffic``: member -> bytes from, to it.

    ``made``, ``kept``: newest version that it holds, and has written. ``past``: bytes of members that have gone.
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


class ShardedWeights:
    """As :class:`outer.LocalWeights`, for weights held by ``count`` shard processes.

    Shards are accepted until all are there (``ready``); from then on, losing one ends the training. A sum counts as
    arrived when its header and all pieces are there; an update is made when all shards have made it. ``theta`` None:
    each shard continues from its checkpoint. ``outer``: hash of the optimizer. ``keeps``: each needs a checkpoint
    directory. ``saved_version``: of the last checkpoint that all have written.
    """

    def __init__(
        self, count: int, layout: Layout, settings: Settings, machine: Server, theta: Tensor | None, *, outer: int,
        keeps: bool, run: int, clock: Callable[[], float], tell: Callable[[str, Any, Any], None],
        on_ready: Callable[[str], None], on_failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        if settings.robust:
            raise ValueError('robust="clip" measures whole contributions, and shards have slices: give robust=none')
        self.shards: dict[int, ShardState] = {}
        self.pieces, self._dtype = slices(layout.numel, count), layout.dtype
        self._settings, self._machine, self._theta = settings, machine, theta
        self._outer, self._keeps, self._run = outer, keeps, run
        self._clock, self._tell, self._on_ready, self._on_failed = clock, tell, on_ready, on_failed
        self._most_bytes = most_bytes(settings, layout)
        self._seconds = allowance(self._most_bytes, settings.lease_seconds)
        self._assemblies: dict[int, Assembly] = {}
        self._making: tuple[int, bool, _Done] | None = None
        self._late_at = math.inf
        self._saving: tuple[str | Path, checkpoints.Saved] | None = None
        self.saved_version = None if theta is not None else machine.version
        self.ready = self.lost = False

    def _register(self, peer: Peer, message: msg.RegisterShard) -> None:
        if reason := self.objection(message):
            refuse(peer, message.index, reason)
            return
        host = "" if peer.host.startswith("127.") else peer.host
        shard = ShardState(message.index, host, message.port, peer)
        peer.start(
            msg.CODEC,
            seconds=self._settings.lease_seconds,
            most_bytes=self._most_bytes,
            deliver=partial(self._tell, "shard", shard),
            closed=partial(self._tell, "shard lost", shard),
            beat=msg.Ping(),
        )
        tensor = None if self._theta is None else self._theta[self.pieces[message.index]]
        peer.post(msg.ShardAccepted(self._machine.version, self._run, tensor))
        self.shards[message.index] = shard

    def objection(self, message: msg.RegisterShard) -> int:
        if message.protocol != msg.PROTOCOL:
            return msg.SHARD_PROTOCOL
        if not 0 <= message.index < len(self.pieces):
            return msg.NO_INDEX
        if message.index in self.shards:
            return msg.SHARD_TAKEN
        if message.outer != self._outer:
            return msg.OTHER_OUTER
        return msg.NO_DIRECTORY if self._keeps and not message.keeps else 0

    def addresses(self) -> str:
        """Return the shards' addresses as text for the leaders, who recognise a shard by its certificate."""
        places = []
        for _, shard in sorted(self.shards.items()):
            shown = shard.peer.other.shown
            places.append([shard.host, shard.port, shown.fingerprint if shown else ""])
        return json.dumps({"count": len(self.pieces), "places": places})

    def _post(self, message: Any) -> None:
        for shard in list(self.shards.values()):
            shard.peer.post(message)

    def close(self, version: int | None) -> None:
        """Let the shards go: training has ended at ``version``; None: they should wait for another server."""
        for shard in self.shards.values():
            if version is not None:
                shard.peer.post(msg.Stop(0, version))
            shard.peer.finish()
        for shard in self.shards.values():
            shard.peer.join(2.0)

    def status(self) -> tuple[ShardStatus, ...]:
        rows = []
        for index in range(len(self.pieces)):
            shard = self.shards.get(index)
            bytes_of = [] if shard is None else [*shard.traffic.values(), shard.past]
            up, down = sum(row[0] for row in bytes_of), sum(row[1] for row in bytes_of)
            rows.append(ShardStatus(index, shard is not None and shard.ready, up, down))
        return tuple(rows)

    def _gone(self, shard: ShardState, reason: str) -> None:
        """Note that a shard's connection has ended. ``ShardLost``: training has begun, so its weights are lost."""
        if self.shards.get(shard.index) is not shard:
            return
        if not self.ready:
            del self.shards[shard.index]
            logger.warning("shard %d left before the start (%s): the server waits for it", shard.index, reason)
            return
        where = f"{shard.host}:{shard.port}" if shard.host else f"port {shard.port} of the server's machine"
        again = (
            "without --checkpoint-dir they start over"
            if self.saved_version is None
            else f"with the --checkpoint-dir directories that they had, they continue from version {self.saved_version}"
        )
        self.lost = True
        raise ShardLost(
            f"shard {shard.index} ({where}) has gone ({reason}), so training ends at version {self._machine.version}: "
            f"start the server and its shards again; {again}"
        )

    def on_event(self, event: Event, now: float) -> Iterable[msg.Message]:
        what, who, value = event
        if what == "shard":
            return self._on(who, value, now)
        if what == "register":
            self._register(who, value)
        elif what == "shard lost":
            self._gone(who, value)
        return ()

    def _on(self, shard: ShardState, message: Any, now: float) -> Iterable[msg.Message]:
        if self.shards.get(shard.index) is not shard:
            return ()
        if isinstance(message, msg.ShardUpdated):
            self._updated(shard, message)
        elif isinstance(message, msg.ShardSaved):
            self._saved(shard, message)
        elif isinstance(message, msg.PieceArrived):
            shard.traffic[message.member] = message.up, message.down
            return self._arrived(shard, message, now)
        elif isinstance(message, msg.MemberLeft):
            shard.traffic.pop(message.member, None)
            shard.past = shard.past[0] + message.up, shard.past[1] + message.down
            return (msg.Bye(message.member),)
        return ()

    def _updated(self, shard: ShardState, message: msg.ShardUpdated) -> None:
        piece = self.pieces[shard.index]
        if message.tensor is not None and message.tensor.numel() != (piece.stop - piece.start) * self._dtype.itemsize:
            shard.peer.close()
            self._gone(shard, f"it sent {message.tensor.numel()} bytes instead of its slice")
            return
        shard.made = message.version
        if message.tensor is not None:
            shard.slice = message.tensor.view(self._dtype)
        shards = self.shards.values()
        if not shard.ready:
            shard.ready = True
            if len(shards) == len(self.pieces) and all(other.ready for other in shards):
                self.ready, self._theta = True, None
                self._on_ready(self.addresses())
        elif self._making is not None and min(other.made for other in shards) >= self._making[0]:
            (_, show, done), self._making, self._late_at = self._making, None, math.inf
            done(self._whole() if show else None)

    def _arrived(self, shard: ShardState, message: msg.PieceArrived, now: float) -> Iterable[msg.Message]:
        assembly = self._assemblies.get(message.member)
        if assembly is None:
            return ()
        try:
            ready = assembly.piece(message.seq, shard.index, None, now)
        except ValueError:  # a leader of ours never sends a piece twice, or so many pieces
            return (msg.Bye(message.member),)
        return self._named(message.member, ready, now)

    def _whole(self) -> Tensor | None:
        parts = [self.shards[index].slice for index in range(len(self.pieces))]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        """Wait for the final weights and return them, ``[D]``. ``ShardLost``: a shard does not answer."""
        self._ask(msg.ShowWeights(self._machine.version))
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

    def _ask(self, message: msg.ShowWeights | msg.UpdateShard) -> None:
        for shard in self.shards.values():
            shard.slice = None
        self._post(message)

    def read(self, message: msg.Grad) -> msg.Grad:
        if message.tensor is not None:
            raise ValueError("a sum was sent to the server instead of its shards: its connection is closed")
        return message

    def on_message(self, member: int, message: msg.Message, now: float) -> Iterable[msg.Message]:
        """Return the messages now complete, this or earlier ones. A sum's tensor becomes its name, (member, seq)."""
        assembly = self._assemblies.get(member)
        if assembly is None:
            return (message,)
        number = message.seq if isinstance(message, msg.Grad) and message.rows else None
        return self._named(member, assembly.message(message, number, self._seconds, now), now)

    def _named(self, member: int, ready: _Whole, now: float) -> list[msg.Message]:
        until = self._assemblies[member].until
        if until is not None:
            self._machine.expect(member, until - now, now)
        return [m if pieces is None else replace(m, tensor=(member, m.seq)) for m, pieces in ready]

    def attach_payload(self, member: int, message: msg.Message) -> msg.Message:
        """Let the shards send the weights that belong to a message; return the message."""
        if isinstance(message, msg.Weights) and not message.same:
            self._post(msg.SendWeights(member, message.grant))
        elif isinstance(message, msg.Stop):
            self._post(msg.SendWeights(member, msg.LAST))
        return message

    def add_member(self, member: int, ticket: int) -> None:
        self._assemblies[member] = Assembly(len(self.pieces), self._settings.channels == 1)
        self._post(msg.AddMember(member, ticket))

    def forget(self, member: int) -> None:
        """Note that a member has gone. Its sums that have arrived and wait for an update are kept for it."""
        if self._assemblies.pop(member, None) is None:
            return
        parts = [] if self._machine.finished else self._machine.arrived
        kept = tuple(msg.SumOf(member, p.tensor[1]) for p in parts if p.member == member and p.tensor is not None)
        self._post(msg.RemoveMember(member, kept))

    def overdue(self, now: float) -> list[int]:
        """Members whose sums are overdue. An update may take long: a shard that lives is named, and not given up."""
        if self._making is not None and now > self._late_at:
            self._late_at, version = math.inf, self._making[0]
            late = ", ".join(f"shard {i}" for i, shard in sorted(self.shards.items()) if shard.made < version)
            logger.warning("no version %d from %s after %.0f s, despite signs of life", version, late, self._seconds)
        return [member for member, assembly in self._assemblies.items() if assembly.overdue(now)]

    def traffic(self, member: int) -> tuple[int, int]:
        rows = [shard.traffic.get(member, (0, 0)) for shard in list(self.shards.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    @property
    def past(self) -> tuple[int, int]:
        """The same bytes, summed over members that have gone."""
        rows = [shard.past for shard in list(self.shards.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    def drop(self, tensor: Any) -> None:
        self._post(msg.DropSum(*tensor))

    def apply(self, effect: Apply, show: bool, done: _Done) -> None:
        parts = usable(effect.contributions, self._settings)
        rows = tuple(msg.SumOf(part.member, part.tensor[1], part.scale) for part in parts)
        self._making, self._late_at = (effect.version + 1, show, done), self._clock() + self._seconds
        self._ask(msg.UpdateShard(effect.version, sum(len(part.rows) for part in parts), show, rows))

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        """Let the shards write their parts, then write the server's own, while training continues.

        Only one checkpoint is written at a time: a shard keeps two, and one of them must match the server's newest.
        """
        if self._saving is None and not self.lost:
            self._saving = directory, replace(saved, shards=len(self.pieces), run=self._run)
            self._post(msg.SaveShard(saved.version, -1 if self.saved_version is None else self.saved_version))

    def _saved(self, shard: ShardState, message: msg.ShardSaved) -> None:
        """Note that a shard has written its part, or failed to; after the last one, write the server's own."""
        if self._saving is None or message.version != self._saving[1].version:
            return
        if message.failed:
            self._saving = None
            self._on_failed(f"shard {shard.index} could not write its checkpoint of version {message.version}")
            return
        shard.kept = message.version
        if any(other.kept != message.version for other in self.shards.values()):
            return
        (directory, saved), self._saving = self._saving, None
        try:
            checkpoints.save(directory, saved)
            self.saved_version = saved.version
        except OSError as error:
            self._on_failed(str(error))

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        if not self.lost:
            self._wait(lambda: self._saving is None, next_event)


def refuse(peer: Peer, number: int, reason: int) -> None:
    """Send away a node or a shard, and say why."""
    with contextlib.suppress(PairError):
        peer.send(msg.Refused(number, reason), msg.CODEC, _REFUSAL_SECONDS, _REFUSAL_SECONDS)
    peer.close()


def shard_count(caller: Caller) -> int:
    return int(json.loads(caller.note("shards"))["count"])
