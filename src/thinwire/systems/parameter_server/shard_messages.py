"""The messages of a model in shards: between the server and its shard processes, and between shards and leaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAST = 1 << 62
"""Number of the pieces that a STOP announces; larger than all others."""

NO_INDEX, SHARD_TAKEN, SHARD_PROTOCOL, OTHER_OUTER, NO_DIRECTORY = 1, 2, 3, 4, 5
SHARD_REASONS = {
    NO_INDEX: "the server has no shard {index}: count from 0, below what it was started with (--shards)",
    SHARD_TAKEN: "shard {index} already exists: give this one another index, or end the other",
    SHARD_PROTOCOL: "shard {index} and the server run different versions of thinwire: install the same one on both",
    OTHER_OUTER: "shard {index} has a different optimizer from the server: give both the same (outer=, or --outer)",
    NO_DIRECTORY: "the server keeps checkpoints and shard {index} does not: give it its own directory "
    "(checkpoint_dir=, or --checkpoint-dir)",
}


# --- shard and server ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enlist:
    """A shard's first message. ``port``: where leaders find it.

    ``keeps``: it has a directory for checkpoints. ``outer``: hash of its optimizer's type and options.
    """

    index: int
    port: int
    protocol: int
    keeps: bool
    outer: int


@dataclass(frozen=True)
class Enlisted:
    """The server's answer: begin with this slice of the weights or, without one, with the checkpoint of ``version``.

    ``run``: number of the training, to recognise checkpoints of another training.
    """

    version: int
    run: int
    tensor: Any = None


@dataclass(frozen=True)
class Admit:
    """The leader that showed this ticket is member ``member`` from now on."""

    member: int
    ticket: int


@dataclass(frozen=True)
class Term:
    """A sum that an update uses, or that is kept: its member, its number and its factor."""

    member: int
    seq: int
    scale: float = 1.0


@dataclass(frozen=True)
class Dismiss:
    """A member has gone: close its connection and drop its sums except those in ``rows``."""

    member: int
    rows: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Discard:
    """A sum will not be used."""

    member: int
    seq: int


@dataclass(frozen=True)
class Update:
    """Make version + 1 from ``version``: add ``rows`` in order, divide, step with ``factor`` times the learning rate.

    With ``show`` the answer carries the new slice.
    """

    version: int
    divisor: float
    factor: float
    show: bool = False
    rows: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Give:
    """Send a leader the current weights of your slice, as its piece ``number``."""

    member: int
    number: int


@dataclass(frozen=True)
class Save:
    """Write a checkpoint of this version, the current one.

    ``whole``: the version that all processes have written last, which must be kept; -1: none.
    """

    version: int
    whole: int = -1


@dataclass(frozen=True)
class Show:
    """Send the server the current slice."""

    version: int


@dataclass(frozen=True)
class Made:
    """A shard now has this version. If there is a tensor, it is the slice that was asked for."""

    version: int
    tensor: Any = None


@dataclass(frozen=True)
class Kept:
    """A shard has written the checkpoint of this version, or ``failed`` to."""

    version: int
    failed: bool = False


@dataclass(frozen=True)
class Arrived:
    """A piece of a member's sum has arrived. ``up``, ``down``: bytes from and to the member since it connected."""

    member: int
    seq: int
    up: int
    down: int


@dataclass(frozen=True)
class Left:
    """The connection of a member has ended; its final byte counts."""

    member: int
    up: int
    down: int


# --- leader and shard ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ticket:
    """A leader's first message to a shard: the number that its HELLO to the server will repeat."""

    number: int


@dataclass(frozen=True)
class Piece:
    """A slice of the sum ``number`` (GRAD's ``seq``) or of the weights ``number`` (WEIGHTS' ``grant``, or ``LAST``).

    ``delta``: it is a compressed difference from the slice sent before.
    """

    member: int
    number: int
    delta: bool = False
    tensor: Any = None


ShardMessage = (
    Enlist | Enlisted | Admit | Dismiss | Discard | Update | Give | Save | Show | Made | Kept | Arrived | Left | Ticket
    | Piece
)  # fmt: skip
SHARD_KINDS: tuple[type, ...] = (
    Enlist, Enlisted, Admit, Dismiss, Discard, Update, Give, Save, Show, Made, Kept, Arrived, Left, Ticket, Piece,
)  # fmt: skip
