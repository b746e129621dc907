"""The messages of the two ends: tensors of several kinds, or a small JSON text, checked before anything is stored.

Over a link a message is a record of :data:`CODEC`, with a row for each tensor and the tensors' bytes one after another.
Nothing is ever unpickled. A :class:`ByteLedger` counts the bytes by kind.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.link.codec import FRAME, ROW_BYTES, Codec, Hash64
from thinwire.systems.split.errors import SessionError

KINDS = (
    "ready", "z", "lengths", "slots", "labels", "logits", "dlogits", "dz", "loss", "checkpoint", "done", "bye", "error",
    "ids", "types", "pixels",
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.uint16,
    torch.uint32,
)  # fmt: skip
_TEXT = len(DTYPES)
_MOST_PARTS = 8
MOST_TEXT = 1 << 16
_DIMENSION = 1 << 31
_STATE = {"z": "activation", "dz": "gradient"}
_DATA = ("logits", "dlogits", "labels", "lengths", "slots", "loss", "ids", "types", "pixels")

Fields = dict[str, Any]


@dataclass
class ByteLedger:
    """Counts at one end, in both directions; bytes sent again after a lost connection count again.

    Attributes:
        sent, received: bytes by kind: activation, gradient, logits, dlogits, labels, lengths, slots, loss, ids, types,
            pixels, control, header; and link: hellos, proofs and what TLS adds.
        messages: how many, by the kind of their first part; both directions.
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)

    def count(self, message: Message, direction: Counter[str]) -> None:
        """Count a message in ``sent`` or ``received``."""
        self.messages[message.kind] += 1
        direction["header"] += header_bytes(len(message.parts) or 1)
        if message.fields is not None:
            direction["control"] += len(json.dumps(message.fields))
        for kind, tensor in message.parts:
            direction[_STATE.get(kind, kind if kind in _DATA else "control")] += tensor.nbytes

    def since(self, earlier: ByteLedger) -> ByteLedger:
        """Return what was counted since the ledger was ``earlier``."""
        return ByteLedger(self.sent - earlier.sent, self.received - earlier.received, self.messages - earlier.messages)

    @property
    def wire(self) -> int:
        """Everything that went through the socket, both directions."""
        return sum(self.sent.values()) + sum(self.received.values())

    @property
    def state(self) -> int:
        """Only activations and their gradients, both directions: what the published ratio counts."""
        return sum(way[kind] for way in (self.sent, self.received) for kind in _STATE.values())

    def to_data(self) -> dict[str, dict[str, int]]:
        """Return the counts as plain data."""
        return {name: dict(sorted(getattr(self, name).items())) for name in ("sent", "received", "messages")}


@dataclass(frozen=True)
class Message:
    kind: str  # of its first part
    step: int = 0  # of the edge's training, from 0
    sequence: int = 0  # of this request, or of the request that it answers
    evaluation: bool = False  # dropout is off, nothing is updated
    parts: tuple[tuple[str, Tensor], ...] = ()  # tensors with their kinds
    fields: Fields | None = None  # of a control message, which has no tensors

    def tensors(self, kind: str) -> list[Tensor]:
        return [tensor for name, tensor in self.parts if name == kind]

    def one(self, kind: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the only tensor of a kind; refuse none, more than one, and another dtype or shape."""
        found = self.tensors(kind)
        if len(found) != 1:
            raise SessionError(f"step {self.step}: a message {self.kind!r} holds {len(found)} parts {kind!r}, not one")
        if (dtype is not None and found[0].dtype != dtype) or (shape is not None and tuple(found[0].shape) != shape):
            raise SessionError(
                f"step {self.step}: {kind!r} came as {found[0].dtype} {list(found[0].shape)}, "
                f"expected {dtype or 'any'} {list(shape) if shape is not None else 'of any shape'}"
            )
        return found[0]


def header_bytes(parts: int) -> int:
    return FRAME.size + ROW_BYTES * parts


@dataclass(frozen=True)
class Part:
    """A tensor: places in ``KINDS`` and ``DTYPES``, and its dimensions plus 1, two in each number; 0: there is none."""

    kind: int
    dtype: int
    first: int
    last: int

    @classmethod
    def of(cls, kind: str, dtype: int, shape: tuple[int, ...]) -> Part:
        a, b, c, d = (*(1 + size for size in shape), 0, 0, 0, 0)[:4]
        return cls(KINDS.index(kind), dtype, a * _DIMENSION + b, c * _DIMENSION + d)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size - 1 for pair in (self.first, self.last) for size in divmod(pair, _DIMENSION) if size)


@dataclass(frozen=True)
class Packed:
    """A message as it travels. ``check``: CRC-32 of all else."""

    step: int
    sequence: int
    evaluation: bool
    check: Hash64
    rows: tuple[Part, ...] = ()
    tensor: Any = None

    def checksum(self, data: Tensor) -> int:
        head = CODEC.encode(replace(self, check=0, tensor=None), None, data.nbytes)
        return zlib.crc32(memoryview(data.numpy()), zlib.crc32(head))  # type: ignore[arg-type]


CODEC = Codec("split training", (Packed,))


def pack(message: Message) -> Packed:
    """``ValueError``: no message can hold that."""
    rows, pieces = [], []
    if message.fields is not None:
        text = torch.frombuffer(bytearray(json.dumps(message.fields), "ascii"), dtype=torch.uint8)
        if len(text) > MOST_TEXT:
            raise ValueError(f"a control message of {len(text)} bytes is over the limit of {MOST_TEXT}")
        rows, pieces = [Part.of(message.kind, _TEXT, text.shape)], [text]
    for kind, tensor in message.parts:
        if tensor.dtype not in DTYPES or tensor.dim() > 4:
            raise ValueError(f"{kind!r}: no message can hold a {tensor.dtype} of {tensor.dim()} dimensions")
        rows.append(Part.of(kind, DTYPES.index(tensor.dtype), tensor.shape))
        pieces.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    if not 1 <= len(rows) <= _MOST_PARTS or KINDS[rows[0].kind] != message.kind:
        raise ValueError(f"a message {message.kind!r} of {len(rows)} parts cannot be sent")
    data = torch.cat(pieces)
    made = Packed(message.step, message.sequence, message.evaluation, 0, tuple(rows), data if len(data) else None)
    return replace(made, check=made.checksum(data))


def unpack(packed: Packed) -> Message:
    """``ValueError``: it was damaged on the way, or is none of ours."""
    data = torch.empty(0, dtype=torch.uint8) if packed.tensor is None else packed.tensor
    if packed.checksum(data) != packed.check:
        raise ValueError("the checksum of a message is wrong: it was damaged on the way")
    if not 1 <= len(packed.rows) <= _MOST_PARTS:
        raise ValueError(f"a message of {len(packed.rows)} parts")
    parts: list[tuple[str, Tensor]] = []
    fields: Fields | None = None
    for row in packed.rows:
        shape = row.shape
        if not 0 <= row.kind < len(KINDS) or not 0 <= row.dtype <= _TEXT or min(shape, default=0) < 0:
            raise ValueError(f"a part of kind {row.kind} and type {row.dtype} is unknown: the ends run two versions")
        dtype = torch.uint8 if row.dtype == _TEXT else DTYPES[row.dtype]
        size = math.prod(shape) * dtype.itemsize
        if size > len(data):
            raise ValueError(f"{len(data)} bytes cannot hold {list(shape)} numbers of {dtype}")
        piece, data = data[:size].clone(), data[size:]
        if row.dtype == _TEXT:
            fields = read_text(bytes(piece.tolist()))
            continue
        try:
            parts.append((KINDS[row.kind], piece.view(dtype).view(shape)))
        except RuntimeError as error:  # an empty tensor with absurd dimensions
            raise ValueError(f"a tensor cannot have the dimensions {list(shape)}") from error
    if len(data) or (fields is not None and len(packed.rows) > 1):
        raise ValueError("a message holds more than it announces")
    first = KINDS[packed.rows[0].kind]
    return Message(first, packed.step, packed.sequence, packed.evaluation, tuple(parts), fields)


def read_text(text: bytes) -> Fields:
    """Read the JSON object of a control message. ``ValueError``: it is none, or too long."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"a control message of {len(text)} bytes is over the limit of {MOST_TEXT}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a control message is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("a control message is not a JSON object")
    return fields
