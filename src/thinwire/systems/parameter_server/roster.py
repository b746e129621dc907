"""The server's shard processes: which may join, where each is found, what each has computed and written."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.systems.link.errors import PairError
from thinwire.systems.link.pair import Pair
from thinwire.systems.parameter_server.connection import Anything, Connection
from thinwire.systems.parameter_server.messages import PROTOCOL, Ping, Refused, Stop, encode
from thinwire.systems.parameter_server.shard_messages import (
    NO_DIRECTORY,
    NO_INDEX,
    OTHER_OUTER,
    SHARD_PROTOCOL,
    SHARD_TAKEN,
    Enlist,
    Enlisted,
)
from thinwire.systems.parameter_server.status import ShardStatus

logger = logging.getLogger("thinwire")

Tell = Callable[[str, Any, Any], None]
"""Puts an event into the server's queue: what ("shard" or "shard lost"), who, value."""


class ShardLost(RuntimeError):
    """A shard has gone, and with it a part of the weights."""


@dataclass(eq=False)
class Post:
    """One shard and its state.

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
    connection: Connection
    ready: bool = False
    made: int = -1
    kept: int = -1
    slice: Tensor | None = None
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)
    past: tuple[int, int] = (0, 0)


class Roster:
    """Accepts shards until all are there; from then on, losing one ends the training.

    Args:
        count: k, the number of shards.
        lease_seconds: a shard that is silent for so long counts as gone.
        outer: hash of the optimizer that every shard must have.
        keeps: whether every shard must have a directory for checkpoints.
        most_bytes: size of the largest tensor that a shard may send.
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
        """Accept a shard that has connected, with ``answer`` of its index, or send it the reason for the refusal."""
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
        """Return the reason for refusing this shard; 0 if it is accepted."""
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
        """Return whether this is still the current shard with its index."""
        return self.posts.get(post.index) is post

    def gone(self, post: Post, reason: str, version: int, saved: int | None) -> None:
        """Note that a shard's connection ended at ``version``; ``saved``: version of the last checkpoint.

        Raises:
            ShardLost: training has begun, so its part of the weights is lost.
        """
        if not self.has(post):
            return
        if not self.started:
            del self.posts[post.index]
            logger.warning("shard %d left before the start (%s): the server waits for it", post.index, reason)
            return
        where = f"{post.host}:{post.port}" if post.host else f"port {post.port} of the server's machine"
        again = (
            "without --checkpoint-dir they start over"
            if saved is None
            else f"with the --checkpoint-dir directories that they had, they continue from version {saved}"
        )
        raise ShardLost(
            f"shard {post.index} ({where}) has gone ({reason}), so training ends at version {version}: start the "
            f"server and its shards again; {again}"
        )

    def addresses(self) -> str:
        """Return the shards' addresses as text for the leaders."""
        posts = [post for _, post in sorted(self.posts.items())]
        shown = [post.connection.pair.other.shown for post in posts]  # leaders recognise a shard by its certificate
        places = [[p.host, p.port, one.fingerprint if one else ""] for p, one in zip(posts, shown)]
        return json.dumps({"count": self.count, "places": places})

    def post(self, message: Anything) -> None:
        """Send a message to all shards."""
        for post in list(self.posts.values()):
            post.connection.post(message)

    def _beat(self) -> None:
        """Send signs of life, in a separate thread, so that the user's ``on_update`` does not look like silence."""
        while not self._over.wait(self._lease / 3):
            self.post(Ping())

    def close(self, version: int | None) -> None:
        """Let the shards go: training has ended at ``version``; None: they should wait for another server."""
        self._over.set()
        for post in self.posts.values():
            if version is not None:
                post.connection.post(Stop(0, version))
            post.connection.finish()
        for post in self.posts.values():
            post.connection.join(2.0)

    def status(self) -> tuple[ShardStatus, ...]:
        """Return the status of each shard."""
        rows = []
        for index in range(self.count):
            post = self.posts.get(index)
            bytes_of = [] if post is None else [*post.traffic.values(), post.past]
            up, down = sum(row[0] for row in bytes_of), sum(row[1] for row in bytes_of)
            rows.append(ShardStatus(index, post is not None and post.ready, up, down))
        return tuple(rows)
