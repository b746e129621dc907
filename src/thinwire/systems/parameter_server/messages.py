"""The messages between workers, leaders and the server: frozen records, and how they are sent.

A record becomes a frame of sixteen 64-bit integers (128 bytes). Its tensor, and the rows that describe what the tensor
contains, follow the frame; nothing is pickled.
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass, fields
from typing import Any

from thinwire.systems.parameter_server.shard_messages import SHARD_KINDS, Dismiss, ShardMessage, Term, Update

PROTOCOL = 5
MOST_WORKERS = 1 << 12
"""The most workers of one node."""
FRAME = struct.Struct("<16q")
ROW_BYTES = 32
_FLOATS = {"loss_sum", "weight", "loss", "seconds", "divisor", "factor"}
_HASHES = {"layout", "outer"}
_FINITE = {"weight", "divisor", "factor"}  # a loss may have any value
_MOST = 1 << 62  # the largest number accepted
_FLAGS = {"same", "delta", "keeps", "show", "failed"}


@dataclass(frozen=True)
class Hello:
    """A leader asks to become a member.

    ``layout``: hash of the parameters' names, shapes and dtypes. ``instance``: of the leader's process, to tell a
    leader that returns from another process with the same number. ``ticket``: the number shown to every shard; 0
    without shards.
    """

    node: int
    workers: int
    layout: int = 0
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
    """Weights of a version.

    ``same``: as sent before, so no tensor. ``delta``: the tensor is a compressed difference from those sent before.
    ``allowed``: the last start that the leader may make (SSP). ``steps``: batches per submission. ``ack``: iteration
    number of the newest sum that has arrived.
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

    Attributes:
        seq: increases with every message of the member.
        in_total: submissions finished since WELCOME, including dropped ones.
        low: no gradient that is not yet buffered has, or will have, an older base.
        buf_low: the oldest base in the buffer.
        grant: number of the newest WEIGHTS received.
        loss_sum, samples: since WELCOME.
        dropped: submissions that were not finite, since WELCOME.
        step_us: microseconds of a worker's step, smoothed.
        alive: number of workers that are alive.
        probe: number of the newest FENCE that asked for a sign of life.
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
    """Start nothing on a base older than ``next_version`` - S. With the current version: only a sign of life.

    ``probe``: if not 0, the answer must contain it.
    """

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
    """A sum of gradients.

    ``pull`` 0: pushed. ``rows``: the gradients in it; ``weight``: what it adds to the divisor.
    """

    member: int
    pull: int
    seq: int
    in_total: int
    low: int
    grant: int
    weight: float
    rows: tuple[Row, ...] = ()
    tensor: Any = None


@dataclass(frozen=True)
class Stop:
    """Training has ended at ``version``; the tensor, if any, holds the final weights.

    From leader to worker, ``version`` -1 means that the node gives up.
    """

    member: int
    version: int
    tensor: Any = None


@dataclass(frozen=True)
class Bye:
    """The leader leaves."""

    member: int


@dataclass(frozen=True)
class Nack:
    """The server does not know this member (any more): say HELLO again."""

    member: int


@dataclass(frozen=True)
class Refused:
    """The server refuses this leader; ``reason`` is a key of ``REASONS``."""

    node: int
    reason: int


TAKEN, OTHER_MODEL, OTHER_PROTOCOL = 1, 2, 3
REASONS = {
    TAKEN: "node {node} is at work in another process: give this one its own number (node_id=, or --node)",
    OTHER_MODEL: "node {node} has a different model from the server: start all with the same model",
    OTHER_PROTOCOL: "node {node} and the server run different versions of thinwire: install the same one on both",
}


@dataclass(frozen=True)
class Buffers:
    """Buffers in fp64: from a worker, from a node, and at the end from the server. ``member``: 0 inside a node."""

    member: int
    tensor: Any = None


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


Message = Hello | Welcome | Weights | IterationNumber | Pull | Fence | Grad | Stop | Bye | Nack | Refused
Local = Buffers | Enter | Work | Result | Ping
KINDS: tuple[type, ...] = (
    Hello, Welcome, Weights, IterationNumber, Pull, Fence, Grad, Stop, Bye, Nack, Refused, Enter, Work, Result, Ping,
    Buffers, *SHARD_KINDS,
)  # fmt: skip
_APART = {"rows", "tensor"}
_NAMES = {kind: tuple(f.name for f in fields(kind) if f.name not in _APART) for kind in KINDS}
_NUMBER = {kind: place for place, kind in enumerate(KINDS)}


_WITH_ROWS = (Grad, Update, Dismiss)
_WITH_TENSOR = frozenset(kind for kind in KINDS if any(f.name == "tensor" for f in fields(kind)))


def encode(message: Message | Local | ShardMessage, rows: int = 0, tensor_bytes: int = 0) -> bytes:
    """Return the frame of a message: kind, following rows and bytes, then its fields in order."""
    kind = type(message)
    values = [_NUMBER[kind], rows, tensor_bytes]
    for name in _NAMES[kind]:
        value = getattr(message, name)
        values.append(_bits(value) if name in _FLOATS else int(value))
    return FRAME.pack(*values, *([0] * (16 - len(values))))


def decode(frame: bytes) -> tuple[Message | Local | ShardMessage, int, int]:
    """Return the message of a frame, and the number of rows and tensor bytes that follow it.

    Raises:
        ValueError: it is not a valid frame.
    """
    number, rows, tensor_bytes, *values = FRAME.unpack(frame)
    if not 0 <= number < len(KINDS) or rows < 0 or tensor_bytes < 0:
        raise ValueError("what arrived is not a message of a parameter server: is another program using the port?")
    kind = KINDS[number]
    if rows and kind not in _WITH_ROWS:
        raise ValueError(f"a {kind.__name__} with rows is not a message of a parameter server")
    if tensor_bytes and kind not in _WITH_TENSOR:
        raise ValueError(f"a {kind.__name__} with a tensor is not a message of a parameter server")
    if not tensor_bytes and kind is Buffers:
        raise ValueError("Buffers without a tensor are not a message of a parameter server")
    options: dict[str, Any] = {}
    for name, value in zip(_NAMES[kind], values):
        options[name] = _float(value) if name in _FLOATS else bool(value) if name in _FLAGS else value
        if name not in _FLOATS and name not in _HASHES:
            _checked(value)
        if name in _FINITE and not math.isfinite(options[name]):
            raise ValueError(f"a {kind.__name__} with {name}={options[name]} is not a message of a parameter server")
    return kind(**options), rows, tensor_bytes


def encode_rows(message: Any) -> bytes:
    """Return the rows of a message, four integers each; empty if it has none."""
    numbers: list[int] = []
    for row in getattr(message, "rows", ()):
        if isinstance(row, Term):
            numbers += (row.member, row.seq, _bits(row.scale), 0)
        else:
            numbers += (row.base, row.worker, row.step, row.samples)
    return array("q", numbers).tobytes()


def decode_rows(message: Message | Local | ShardMessage, data: bytes) -> tuple[Row, ...] | tuple[Term, ...]:
    """Return the rows that belong to a message.

    Raises:
        ValueError: a number in them is out of range.
    """
    numbers = array("q", data).tolist()
    quads = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    if isinstance(message, Grad):
        return tuple(Row(*(_checked(x, _MOST - 1) for x in quad)) for quad in quads)  # step + 1 must fit too
    return tuple(Term(_checked(member), _checked(seq), _float(scale)) for member, seq, scale, _ in quads)


def _checked(number: int, most: int = _MOST) -> int:
    if not -most <= number <= most:
        raise ValueError(f"{number} in a message is larger than anything that a parameter server counts")
    return number


def _bits(value: float) -> int:
    (number,) = struct.unpack("<q", struct.pack("<d", value))
    return int(number)


def _float(bits: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)
