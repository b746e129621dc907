"""The messages between workers, leaders, server and shards; ``CODEC`` sends them.

A message is a frame of 128 bytes; its tensor, and the rows that say what the tensor contains, follow the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.systems.link.codec import Codec, Hash64

PROTOCOL = 8
MOST_WORKERS = 1 << 12  # of one node
LAST = 1 << 62
"""Number of the pieces that a STOP announces; larger than all others."""

TAKEN, OTHER_MODEL, OTHER_PROTOCOL = 1, 2, 3
REASONS = {
    TAKEN: "node {node} is at work in another process: give this one its own number (node=, node_id= or --node)",
    OTHER_MODEL: "node {node} has a different model from the server: start all with the same model",
    OTHER_PROTOCOL: "node {node} and the server run different versions of thinwire: install the same one on both",
}
NO_INDEX, SHARD_TAKEN, SHARD_PROTOCOL, OTHER_OUTER, NO_DIRECTORY = 1, 2, 3, 4, 5
SHARD_REASONS = {
    NO_INDEX: "the server has no shard {index}: count from 0, below what it was started with (--shards)",
    SHARD_TAKEN: "shard {index} already exists: give this one another index, or end the other",
    SHARD_PROTOCOL: "shard {index} and the server run different versions of thinwire: install the same one on both",
    OTHER_OUTER: "shard {index} has a different optimizer from the server: give both the same (outer=, or --outer)",
    NO_DIRECTORY: "the server keeps checkpoints and shard {index} does not: give it its own directory "
    "(checkpoint_dir=, or --checkpoint-dir)",
}


@dataclass(frozen=True)
class Hello:
    """A leader asks to become a member. ``instance``: of its process. ``ticket``: shown to shards; 0 without shards."""

    node: int
    workers: int
    layout: Hash64 = 0
    protocol: int = PROTOCOL
    instance: int = 0
    ticket: int = 0


@dataclass(frozen=True)
class Welcome:
    """The server's answer: a new member number. The leader discards all it had. ``next_step``: of its workers' data."""

    member: int
    version: int
    next_step: int = 0


@dataclass(frozen=True)
class Weights:
    """Weights of a version. ``same``: as sent before, so no tensor. ``delta``: the tensor is a compressed difference.

    ``allowed``: the last start (SSP). ``steps``: batches per submission. ``ack``: the newest sum that has arrived.
    """

    member: int
    version: int
    grant: int
    allowed: int
    steps: int
    same: bool = False
    delta: bool = False
    ack: int = 0
    tensor: Any = None


@dataclass(frozen=True)
class IterationNumber:
    """IN: what a node has finished, and bounds on what it still holds; it also serves as a sign of life.

    ``in_total``: submissions, of which ``dropped`` were not finite; these, loss and samples since WELCOME. ``low``: no
    gradient not yet buffered has, or will have, an older base; ``buf_low``: the oldest base in the buffer. ``step_us``:
    smoothed. ``probe``: of the newest FENCE that asked for a sign of life.
    """

    member: int
    seq: int
    in_total: int
    low: int
    buf_low: int
    grant: int
    loss_sum: float = 0.0
    samples: int = 0
    dropped: int = 0
    step_us: int = 0
    alive: int = 1
    probe: int = 0


@dataclass(frozen=True)
class Pull:
    """Send all that is buffered, for the update that makes ``next_version``."""

    member: int
    pull: int
    next_version: int


@dataclass(frozen=True)
class Fence:
    """Start on no base older than ``next_version`` - S (the current: a sign of life); the answer repeats ``probe``."""

    member: int
    next_version: int
    probe: int = 0


@dataclass(frozen=True)
class Row:
    """Where one gradient came from."""

    base: int
    worker: int
    step: int
    samples: int


@dataclass(frozen=True)
class Grad:
    """A sum of the gradients in ``rows``. ``pull`` 0: pushed."""

    member: int
    pull: int
    seq: int
    in_total: int
    low: int
    grant: int
    rows: tuple[Row, ...] = ()
    tensor: Any = None


@dataclass(frozen=True)
class Stop:
    """Training has ended; the tensor holds the final weights. To a worker, ``version`` -1: its node gives up."""

    member: int
    version: int
    tensor: Any = None


@dataclass(frozen=True)
class Bye:
    member: int


@dataclass(frozen=True)
class Nack:
    """The server does not know this member (any more): say HELLO again."""

    member: int


@dataclass(frozen=True)
class Refused:
    """The server refuses this leader, or shard; ``reason`` is a key of ``REASONS``, or of ``SHARD_REASONS``."""

    node: int
    reason: int


@dataclass(frozen=True)
class Buffers:
    """Buffers in fp64: from a worker, from a node, and at the end from the server. ``member``: 0 inside a node."""

    member: int
    tensor: Any


@dataclass(frozen=True)
class Enter:
    """A worker introduces itself to the leader of its node."""

    worker: int


@dataclass(frozen=True)
class Work:
    """Leader to worker: compute ``steps`` batches from submission ``step`` on, at these or the previous weights."""

    token: int
    version: int
    step: int
    steps: int
    tensor: Any = None


@dataclass(frozen=True)
class Result:
    """Worker to leader: the result of a :class:`Work`; no tensor if it was not finite. ``seconds``: of one step."""

    token: int
    samples: int
    loss: float
    seconds: float
    tensor: Any = None


@dataclass(frozen=True)
class Ping:
    """A sign of life, between worker and leader, or shard and server; also a shard's answer to a ticket."""


@dataclass(frozen=True)
class RegisterShard:
    """A shard's first message. ``port``: for leaders. ``keeps``: it writes checkpoints. ``outer``: of its optimizer."""

    index: int
    port: int
    protocol: int
    keeps: bool
    outer: Hash64


@dataclass(frozen=True)
class ShardAccepted:
    """Begin with this slice or, without one, with the checkpoint of ``version`` of the training numbered ``run``."""

    version: int
    run: int
    tensor: Any = None


@dataclass(frozen=True)
class AddMember:
    """The leader that showed this ticket is member ``member`` from now on."""

    member: int
    ticket: int


@dataclass(frozen=True)
class SumOf:
    """A sum that an update uses, or that is kept: its member, its number and its factor."""

    member: int
    seq: int
    scale: float = 1.0


@dataclass(frozen=True)
class RemoveMember:
    """A member has gone: close its connection and drop its sums except those in ``rows``."""

    member: int
    rows: tuple[SumOf, ...] = ()


@dataclass(frozen=True)
class DropSum:
    member: int
    seq: int


@dataclass(frozen=True)
class UpdateShard:
    """Make version + 1: add ``rows`` in order, divide by the number of gradients, step, and ``show`` the slice."""

    version: int
    gradients: int
    show: bool = False
    rows: tuple[SumOf, ...] = ()


@dataclass(frozen=True)
class SendWeights:
    """Send a leader the current weights of your slice, as its piece ``number``."""

    member: int
    number: int


@dataclass(frozen=True)
class SaveShard:
    """Write a checkpoint of the current ``version``; keep ``whole``, the last that all have written (-1: none)."""

    version: int
    whole: int = -1


@dataclass(frozen=True)
class ShowWeights:
    version: int


@dataclass(frozen=True)
class ShardUpdated:
    """A shard now has this version. If there is a tensor, it is the slice that was asked for."""

    version: int
    tensor: Any = None


@dataclass(frozen=True)
class ShardSaved:
    """A shard has written the checkpoint of this version, or ``failed`` to."""

    version: int
    failed: bool = False


@dataclass(frozen=True)
class PieceArrived:
    """A piece of a member's sum has arrived. ``up``, ``down``: bytes from and to the member since it connected."""

    member: int
    seq: int
    up: int
    down: int


@dataclass(frozen=True)
class MemberLeft:
    """The connection of a member has ended; its final byte counts."""

    member: int
    up: int
    down: int


@dataclass(frozen=True)
class Ticket:
    """A leader's first message to a shard: the number that its HELLO to the server will repeat."""

    number: int


@dataclass(frozen=True)
class Piece:
    """A slice of a sum (``number``: GRAD's ``seq``) or of weights (WEIGHTS' ``grant``, or ``LAST``)."""

    member: int
    number: int
    delta: bool = False
    tensor: Any = None


Message = Hello | Welcome | Weights | IterationNumber | Pull | Fence | Grad | Stop | Bye | Nack | Refused
"""What the state machines of server and leader understand."""

CODEC = Codec("a parameter server", (
    Hello, Welcome, Weights, IterationNumber, Pull, Fence, Grad, Stop, Bye, Nack, Refused, Enter, Work, Result, Ping,
    Buffers, RegisterShard, ShardAccepted, AddMember, RemoveMember, DropSum, UpdateShard, SendWeights, SaveShard,
    ShowWeights, ShardUpdated, ShardSaved, PieceArrived, MemberLeft, Ticket, Piece,
))  # fmt: skip
encode, decode = CODEC.encode, CODEC.decode
