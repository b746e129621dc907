"""Weights held by shard processes, as the server's process uses them: pieces, updates of all shards, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.assembly import Assembly
from thinwire.systems.parameter_server.connection import SLOWEST, Anything
from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.keeper import Done, Event
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.messages import Bye, Grad, Message, Stop, Weights
from thinwire.systems.parameter_server.outer import recipe
from thinwire.systems.parameter_server.roster import Post, Roster, ShardLost
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard_messages import (
    LAST,
    Admit,
    Arrived,
    Discard,
    Dismiss,
    Enlisted,
    Give,
    Kept,
    Left,
    Made,
    Save,
    Show,
    Term,
    Update,
)
from thinwire.systems.parameter_server.slices import slices
from thinwire.systems.parameter_server.status import ShardStatus

logger = logging.getLogger("thinwire")


class Fleet:
    """A :class:`Keeper` whose weights are held by k shard processes; every vector is cut into the same slices.

    The server's process keeps the state machine and sends only frames. A sum counts as arrived when its header and all
    k pieces are there; an update is made when all shards have made it.

    Args:
        roster: the shards.
        layout: of the model.
        settings: of the run.
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
        self,
        roster: Roster,
        layout: Layout,
        settings: Settings,
        machine: Server,
        theta: Tensor | None,
        *,
        run: int,
        full: int,
        ready: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        self.roster, self.pieces = roster, slices(layout.numel, roster.count)
        self._dtype, self._settings, self._machine = layout.dtype, settings, machine
        self._theta, self._run, self._full, self._ready, self._failed = theta, run, full, ready, failed
        item = 8 if settings.deterministic else layout.dtype.itemsize
        self._seconds = settings.lease_seconds + layout.numel * item / SLOWEST
        self._assemblies: dict[int, Assembly] = {}
        self._making: tuple[int, bool, Done] | None = None
        self._late_at = math.inf
        self._saving: tuple[str | Path, checkpoints.Saved] | None = None
        self.saved_version = None if theta is not None else machine.version
        self.lost = False

    # --- messages from shards ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.roster.started

    def hear(self, event: Event, now: float) -> Iterable[Message]:
        """See :class:`Keeper`: a shard has come ("enlist"), sends a message ("shard"), or has gone ("shard lost").

        Raises:
            ShardLost: the shard held a part of the weights.
        """
        what, who, value = event
        try:
            if what == "shard":
                return self._on(who, value, now)
            if what == "enlist":
                pair, host = who
                self.roster.enlist(pair, host, value, self._answer)
            elif what == "shard lost":
                self.roster.gone(who, value, self._machine.version, self.saved_version)
        except ShardLost:
            self.lost = True
            raise
        return ()

    def _answer(self, index: int) -> Enlisted:
        """Return the first message to a shard."""
        tensor = None if self._theta is None else self._theta[self.pieces[index]]
        return Enlisted(self._machine.version, self._run, tensor)

    def _on(self, post: Post, message: Anything, now: float) -> Iterable[Message]:
        if not self.roster.has(post):
            return ()
        if isinstance(message, Made):
            self._made(post, message)
        elif isinstance(message, Kept):
            self._kept(post, message)
        elif isinstance(message, Arrived):
            post.traffic[message.member] = message.up, message.down
            return self._arrived(post, message, now)
        elif isinstance(message, Left):
            post.traffic.pop(message.member, None)
            post.past = post.past[0] + message.up, post.past[1] + message.down
            return (Bye(message.member),)
        return ()

    def _made(self, post: Post, message: Made) -> None:
        piece = self.pieces[post.index]
        if message.tensor is not None and message.tensor.numel() != (piece.stop - piece.start) * self._dtype.itemsize:
            post.connection.close()
            why = f"it sent {message.tensor.numel()} bytes instead of its slice"
            self.roster.gone(post, why, self._machine.version, self.saved_version)
            return
        post.made = message.version
        if message.tensor is not None:
            post.slice = message.tensor.view(self._dtype)
        if not post.ready:
            post.ready = True
            if self.roster.all_ready:
                self.roster.started = True
                self._theta = None
                self._ready(self.roster.addresses())
        elif self._making is not None and min(p.made for p in self.roster.posts.values()) >= self._making[0]:
            (_, show, done), self._making, self._late_at = self._making, None, math.inf
            done(self._whole() if show else None)

    def _arrived(self, post: Post, message: Arrived, now: float) -> Iterable[Message]:
        assembly = self._assemblies.get(message.member)
        if assembly is None:
            return ()
        try:
            ready = assembly.piece(message.seq, post.index, None, now)
        except ValueError:  # a leader of ours never sends a piece twice, or so many pieces
            return (Bye(message.member),)
        return self._named(message.member, ready, now)

    def _whole(self) -> Tensor | None:
        """Return the weights, or None until all shards have sent their slices."""
        parts = [self.roster.posts[index].slice for index in range(len(self.pieces))]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])

    def last(self, next_event: Callable[[], Event | None]) -> Tensor:
        """See :class:`Keeper`.

        Raises:
            ShardLost: a shard does not answer.
        """
        self._ask(Show(self._machine.version))
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
                tuple(self.hear(event, now))

    def _ask(self, message: Show | Update) -> None:
        for post in self.roster.posts.values():
            post.slice = None
        self.roster.post(message)

    # --- the keeper -----------------------------------------------------------------------------------------------

    def read(self, message: Grad) -> Grad:
        if message.tensor is not None:
            raise ValueError("a sum was sent to the server instead of its shards: its connection is closed")
        return message

    def heard(self, member: int, message: Message, now: float) -> Iterable[Message]:
        """See :class:`Keeper`; here the tensor of a sum becomes its name on the shards, (member, seq)."""
        assembly = self._assemblies.get(member)
        if assembly is None:
            return (message,)
        number = message.seq if isinstance(message, Grad) and message.rows else None
        return self._named(member, assembly.message(message, number, self._seconds, now), now)

    def _named(self, member: int, ready: list[tuple[Any, list[Any] | None]], now: float) -> list[Message]:
        until = self._assemblies[member].until
        if until is not None:
            self._machine.expect(member, until - now, now)
        return [m if pieces is None else replace(m, tensor=(member, m.seq)) for m, pieces in ready]

    def dress(self, member: int, message: Message) -> Message:
        """See :class:`Keeper`; the shards send the weights."""
        if isinstance(message, Weights) and not message.same:
            self.roster.post(Give(member, message.grant))
        elif isinstance(message, Stop):
            self.roster.post(Give(member, LAST))
        return message

    def admit(self, member: int, ticket: int) -> None:
        self._assemblies[member] = Assembly(len(self.pieces), self._settings.channels == 1)
        self.roster.post(Admit(member, ticket))

    def forget(self, member: int) -> None:
        """See :class:`Keeper`. Sums that have arrived and wait for an update are kept for it."""
        if self._assemblies.pop(member, None) is None:
            return
        parts = [] if self._machine.finished else self._machine.arrived
        kept = tuple(Term(member, p.tensor[1]) for p in parts if p.member == member and p.tensor is not None)
        self.roster.post(Dismiss(member, kept))

    def drop(self, tensor: object) -> None:
        assert isinstance(tensor, tuple)
        self.roster.post(Discard(*tensor))

    def apply(self, effect: Apply, show: bool, done: Done) -> None:
        made = recipe(effect.contributions, self._settings, self._full)
        for part in effect.contributions:
            if part.tensor is not None and part.weight <= 0:
                self.drop(part.tensor)
        parts = made.parts if made is not None else ()
        rows = tuple(Term(part.member, part.tensor[1], part.scale) for part in parts)
        divisor, factor = (made.divisor, made.factor) if made is not None else (1.0, 1.0)
        self._making, self._late_at = (effect.version + 1, show, done), time.monotonic() + self._seconds
        self._ask(Update(effect.version, divisor, factor, show, rows))

    def tick(self, now: float) -> list[int]:
        """See :class:`Keeper`. An update may take long, so a shard that lives is named, and not given up."""
        if self._making is not None and now > self._late_at:
            self._late_at, version = math.inf, self._making[0]
            late = ", ".join(f"shard {i}" for i, post in sorted(self.roster.posts.items()) if post.made < version)
            logger.warning("no version %d from %s after %.0f s, despite signs of life", version, late, self._seconds)
        return [member for member, assembly in self._assemblies.items() if assembly.overdue(now)]

    def traffic(self, member: int) -> tuple[int, int]:
        rows = [post.traffic.get(member, (0, 0)) for post in list(self.roster.posts.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    @property
    def past(self) -> tuple[int, int]:
        rows = [post.past for post in list(self.roster.posts.values())]
        return sum(up for up, _ in rows), sum(down for _, down in rows)

    def shards(self) -> tuple[ShardStatus, ...]:
        return self.roster.status()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, directory: str | Path, saved: checkpoints.Saved) -> None:
        """See :class:`Keeper`: the shards write their parts, then the server its own, while training continues.

        Only one checkpoint is written at a time: a shard keeps two, and one of them must match the server's newest.
        """
        if self._saving is None and not self.lost:
            self._saving = directory, replace(saved, shards=len(self.pieces), run=self._run)
            self.roster.post(Save(saved.version, -1 if self.saved_version is None else self.saved_version))

    def _kept(self, post: Post, message: Kept) -> None:
        """Note that a shard has written its part, or failed to; after the last one, write the server's own."""
        if self._saving is None or message.version != self._saving[1].version:
            return
        if message.failed:
            self._saving = None
            self._failed(f"shard {post.index} could not write its checkpoint of version {message.version}")
            return
        post.kept = message.version
        if any(other.kept != message.version for other in self.roster.posts.values()):
            return
        (directory, saved), self._saving = self._saving, None
        try:
            checkpoints.save(directory, saved)
            self.saved_version = saved.version
        except OSError as error:
            self._failed(str(error))

    def settle(self, next_event: Callable[[], Event | None]) -> None:
        if not self.lost:
            self._wait(lambda: self._saving is None, next_event)

    def close(self, version: int | None) -> None:
        self.roster.close(version)
