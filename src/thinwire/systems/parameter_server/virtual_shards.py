"""Shards in virtual time: a network card each, the pieces of a tensor, and the assembly of the pieces."""

from __future__ import annotations

from itertools import pairwise

from thinwire.systems.parameter_server.assembly import Assembly
from thinwire.systems.parameter_server.connection import SLOWEST
from thinwire.systems.parameter_server.messages import FRAME, Grad, Message, Weights
from thinwire.systems.parameter_server.scenario import Link
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard_messages import Piece
from thinwire.systems.parameter_server.virtual_time import Card

Ends = dict[tuple[str, int], Assembly]
"""The assemblies of one node's connections, by way ("up", "down") and member."""


class VirtualShards:
    """The shards of a simulation. A message between shard and server takes the server link's latency.

    Args:
        count: k.
        settings: of the run.
        link: of the server, and of each shard.
        payload_bytes: of a whole tensor.

    Attributes:
        cards: (to it, from it) of each shard.
        sizes: bytes of each piece, with its frame.
        hop_seconds: time of a message between a shard and the server.
    """

    def __init__(self, count: int, settings: Settings, link: Link, payload_bytes: int) -> None:
        if count < 0:
            raise ValueError(f"shards={count!r} must be at least 0")
        self._settings = settings
        self.cards = [(Card(link.bits_per_second), Card(link.bits_per_second)) for _ in range(count)]
        ends = [payload_bytes * i // max(count, 1) for i in range(count + 1)]
        self.sizes = [FRAME.size + end - first for first, end in pairwise(ends)]
        self.hop_seconds = link.latency_seconds
        self.seconds = settings.lease_seconds + payload_bytes / SLOWEST

    def __len__(self) -> int:
        return len(self.cards)

    def assembly(self, ends: Ends, way: str, message: Message | Piece) -> Assembly:
        """Return the assembly at one end of one membership."""
        key = way, getattr(message, "member", 0)
        if key not in ends:
            ends[key] = Assembly(len(self), self._settings.channels == 1)
        return ends[key]

    def whole(self, assembly: Assembly, message: Message | Piece, shard: int, now: float) -> list[Message]:
        """Return the messages that are complete and next in order, after this message or piece has come."""
        if isinstance(message, Piece):
            ready = assembly.piece(message.number, shard, None, now)
        else:
            ready = assembly.message(message, self.number(message), self.seconds, now)
        return [message for message, _ in ready]

    @staticmethod
    def number(message: Message) -> int | None:
        """Return the number of a message's pieces; None: it has none."""
        if isinstance(message, Weights) and not message.same:
            return message.grant
        return message.seq if isinstance(message, Grad) and message.rows else None

    def pieces(self, message: Message) -> list[tuple[int, Piece, int]]:
        """Return (shard, piece, bytes) for each piece of a message."""
        number = self.number(message)
        if number is None:
            return []
        member: int = message.member  # type: ignore[union-attr]
        return [(index, Piece(member, number), size) for index, size in enumerate(self.sizes)]
