"""The shard processes that a server has: who may come, where each is found, what each has made and written."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.link.errors import PairError
from thinwire.link.pair import Pair
from thinwire.parameter_server.connection import Anything, Connection
from thinwire.parameter_server.messages import PROTOCOL, Ping, Refused, Stop, encode
from thinwire.parameter_server.shard_messages import (
    NO_DIRECTORY,
    NO_INDEX,
    OTHER_OUTER,
    SHARD_PROTOCOL,
    SHARD_TAKEN,
    Enlist,
    Enlisted,
)
from thinwire.parameter_server.status import ShardStatus

logger = logging.getLogger("thinwire")

Tell = Callable[[str, Any, Any], None]
"""Puts an event into the server's queue: what ("shard", "shard lost"), who, value."""


class ShardLost(RuntimeError):
    """A shard has gone, and with it a part of the weights."""


@dataclass(eq=False)
class Post:
    """One shard's place.

    Attributes:
        host, port: where leaders find it; no host: the server's own.
        ready: it has its weights.
        made, kept: newest version that it has, and that it has written.
        slice: what it was asked to show.
        traffic: member -> bytes from it and to it; past: of those who have gone.
    """

    index: int
    host: str
    port: int
    connection: Connection
    ready: bool = False
    made: int = -1
    kept: int = -1
    slice: Tensor | None = None
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)
    past: tuple[int, int] = (0, 0)


class Roster:
    """Takes shards in until all are there; from then on none may go.

    Args:
        count: k.
        lease_seconds: a shard that is silent for so long has gone.
        outer: hash of the optimizer that every shard must have.
        keeps: every shard must have a directory for checkpoints.
        most_bytes: of a tensor that a shard may send.
        tell: see ``Tell``.
    """

    def __init__(
        self, count: int, lease_seconds: float, outer: int, keeps: bool, tell: Tell, *, most_bytes: int
    ) -> None:
        self.count, self._lease, self._outer, self._keeps, self._tell = count, lease_seconds, outer, keeps, tell
        self._most_bytes = most_bytes
        self.posts: dict[int, Post] = {}
        self.started = False
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="thinwire-server-beat", daemon=True)

    @property
    def all_ready(self) -> bool:
        """Whether every shard is there and has its weights."""
        return len(self.posts) == self.count and all(post.ready for post in self.posts.values())

    def enlist(self, pair: Pair, host: str, message: Enlist, answer: Callable[[int], Enlisted]) -> None:
        """A shard has come: take it in with an answer of its index, or say why not."""
        reason = self.objection(message)
        if reason:
            with contextlib.suppress(PairError):
                pair.send_frame(encode(Refused(message.index, reason)))
            pair.close()
            return
        box: list[Post] = []
        connection = Connection(
            pair,
            channels=1,
            seconds=self._lease,
            most_bytes=self._most_bytes,
            deliver=lambda word: self._tell("shard", box[0], word),
            closed=lambda why: self._tell("shard lost", box[0], why),
        )
        post = Post(message.index, "" if host.startswith("127.") else host, message.port, connection)
        box.append(post)
        connection.start().post(answer(message.index))
        self.posts[message.index] = post
        if not self._beating.is_alive():
            self._beating.start()

    def objection(self, message: Enlist) -> int:
        """Why this shard is not taken in; 0 where it is."""
        if message.protocol != PROTOCOL:
            return SHARD_PROTOCOL
        if not 0 <= message.index < self.count:
            return NO_INDEX
        if message.index in self.posts:
            return SHARD_TAKEN
        if message.outer != self._outer:
            return OTHER_OUTER
        return NO_DIRECTORY if self._keeps and not message.keeps else 0

    def has(self, post: Post) -> bool:
        """Whether this is still the shard at its place."""
        return self.posts.get(post.index) is post

    def gone(self, post: Post, reason: str, version: int, saved: int | None) -> None:
        """A shard's connection has ended, at ``version``; ``saved``: that of the last checkpoint.

        Raises:
            ShardLost: training has begun, so its part of the weights is lost.
        """
        if not self.has(post):
            return
        if not self.started:
            del self.posts[post.index]
            logger.warning("shard %d has gone before the start (%s): the server waits for it", post.index, reason)
            return
        where = f"{post.host}:{post.port}" if post.host else f"port {post.port} of the server's machine"
        again = (
            "without --checkpoint-dir they start over"
            if saved is None
            else f"with the --checkpoint-dir directories that they had they go on from version {saved}"
        )
        raise ShardLost(
            f"shard {post.index} ({where}) has gone ({reason}), so training ends at version {version}: start the "
            f"server and its shards again; {again}"
        )

    def addresses(self) -> str:
        """For the leaders, as text."""
        posts = [post for _, post in sorted(self.posts.items())]
        shown = [post.connection.pair.other.shown for post in posts]  # by its certificate a leader knows the shard
        places = [[p.host, p.port, one.fingerprint if one else ""] for p, one in zip(posts, shown)]
        return json.dumps({"count": self.count, "places": places})

    def post(self, message: Anything) -> None:
        """To all shards."""
        for post in list(self.posts.values()):
            post.connection.post(message)

    def _beat(self) -> None:
        """Signs of life, in a thread of their own: what the server's user does at an update is no silence."""
        while not self._over.wait(self._lease / 3):
            self.post(Ping())

    def close(self, version: int | None) -> None:
        """Let the shards go: training has ended at ``version``; None: they shall wait for another server."""
        self._over.set()
        for post in self.posts.values():
            if version is not None:
                post.connection.post(Stop(0, version))
            post.connection.finish()
        for post in self.posts.values():
            post.connection.join(2.0)

    def status(self) -> tuple[ShardStatus, ...]:
        """A line per shard."""
        rows = []
        for index in range(self.count):
            post = self.posts.get(index)
            bytes_of = [] if post is None else [*post.traffic.values(), post.past]
            up, down = sum(row[0] for row in bytes_of), sum(row[1] for row in bytes_of)
            rows.append(ShardStatus(index, post is not None and post.ready, up, down))
        return tuple(rows)
