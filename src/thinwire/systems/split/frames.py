"""Frames, without sockets: tensors and small JSON texts to bytes, and back, checked before anything is stored.

A frame is a header of 32 bytes (big-endian), 4 bytes per dimension, and the payload (little-endian, contiguous):

    offset  size  field
    0       4     magic "TWF1"
    4       1     kind, see KINDS
    5       1     dtype, see DTYPES; 9 is JSON text
    6       1     number of dimensions, at most 4
    7       1     flags: 1 the last frame of its message, 2 evaluation
    8       8     step
    16      4     sequence number of the message, the same in all its frames
    20      8     bytes of the payload
    28      4     CRC-32 of header (without this field), dimensions and payload

A message is one to eight frames. Nothing is ever unpickled. A :class:`ByteLedger` counts them by kind.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.systems.split.errors import FrameError, SessionError

MAGIC = b"TWF1"
HEADER = struct.Struct(">4sBBBBQIQ")
CHECKSUM = struct.Struct(">I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
KINDS = (
    "hello", "ready", "z", "lengths", "slots", "labels", "logits", "dlogits", "dz", "loss", "checkpoint", "done", "bye",
    "error", "ids", "types", "pixels",
)  # fmt: skip
DTYPES = {
    1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64, 5: torch.int8, 6: torch.uint8,
    7: torch.int32, 8: torch.uint16, 10: torch.uint32,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_TEXT = 9
_MOST_FRAMES = 8
_MOST_DIMENSIONS = 4
_MOST_TEXT = 1 << 16
_LAST, _EVALUATION = 1, 2
_STATE = {"z": "activation", "dz": "gradient"}
_DATA = ("logits", "dlogits", "labels", "lengths", "slots", "loss", "ids", "types", "pixels")

Fields = dict[str, Any]


@dataclass
class ByteLedger:
    """Counts at one end, in both directions; bytes sent again after a lost connection count again.

    Attributes:
        sent, received: bytes by kind: activation, gradient, logits, dlogits, labels, lengths, slots, loss, ids, types,
            pixels, control, header, tls.
        messages: how many, by the kind of their first frame; both directions.
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)

    def count(self, message: Message, direction: Counter[str]) -> None:
        """Count a message's frames in ``sent`` or ``received``."""
        self.messages[message.kind] += 1
        if message.fields is not None:
            direction["control"] += len(_text(message.fields))
            direction["header"] += HEADER_BYTES
        for kind, tensor in message.parts:
            direction[_STATE.get(kind, kind if kind in _DATA else "control")] += tensor.numel() * tensor.element_size()
            direction["header"] += HEADER_BYTES + 4 * tensor.dim()

    def add(self, other: ByteLedger) -> None:
        """Add another ledger's counts."""
        for name in ("sent", "received", "messages"):
            getattr(self, name).update(getattr(other, name))

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
    kind: str  # of its first frame
    step: int = 0  # of the edge's training, from 0
    sequence: int = 0  # of this request, or of the request that it answers
    evaluation: bool = False  # dropout is off, nothing is updated
    parts: tuple[tuple[str, Tensor], ...] = ()  # tensors with the kinds of their frames
    fields: Fields | None = None  # of a control message, which has no tensors

    def tensors(self, kind: str) -> list[Tensor]:
        return [tensor for name, tensor in self.parts if name == kind]

    def one(self, kind: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the only tensor of a kind; refuse none, more than one, and another dtype or shape."""
        found = self.tensors(kind)
        if len(found) != 1:
            raise SessionError(f"step {self.step}: a message {self.kind!r} holds {len(found)} frames {kind!r}, not one")
        if (dtype is not None and found[0].dtype != dtype) or (shape is not None and tuple(found[0].shape) != shape):
            raise SessionError(
                f"step {self.step}: {kind!r} came as {found[0].dtype} {list(found[0].shape)}, "
                f"expected {dtype or 'any'} {list(shape) if shape is not None else 'of any shape'}"
            )
        return found[0]


def encode(message: Message, ledger: ByteLedger | None = None) -> Iterator[bytes]:
    """Yield the bytes of a message, piece by piece; ``FrameError``: no frame can hold it."""
    _check_byteorder()
    frames: list[tuple[str, int, tuple[int, ...], bytes]] = []
    if message.fields is not None:
        frames.append((message.kind, _TEXT, (), _text(message.fields)))
    for kind, tensor in message.parts:
        if tensor.dtype not in _CODES or tensor.dim() > _MOST_DIMENSIONS:
            raise FrameError(f"{kind!r}: no frame can hold a {tensor.dtype} of {tensor.dim()} dimensions")
        data = tensor.detach().cpu().contiguous().reshape(-1)
        payload = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        frames.append((kind, _CODES[tensor.dtype], tuple(tensor.shape), payload))
    if not 1 <= len(frames) <= _MOST_FRAMES or frames[0][0] != message.kind:
        raise FrameError(f"a message {message.kind!r} of {len(frames)} frames cannot be sent")
    if ledger is not None:
        ledger.count(message, ledger.sent)
    for position, (kind, dtype, dims, payload) in enumerate(frames):
        flags = _LAST * (position == len(frames) - 1) + _EVALUATION * message.evaluation
        code, size = KINDS.index(kind) + 1, len(payload)
        head = HEADER.pack(MAGIC, code, dtype, len(dims), flags, message.step, message.sequence, size)
        sizes = struct.pack(f">{len(dims)}I", *dims)
        yield head + CHECKSUM.pack(_checksum(head, sizes, payload)) + sizes
        if payload:
            yield payload


def _text(fields: Fields) -> bytes:
    text = json.dumps(fields).encode()
    if len(text) > _MOST_TEXT:
        raise FrameError(f"a control message of {len(text)} bytes is over the limit of {_MOST_TEXT}")
    return text


def _checksum(head: bytes, sizes: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(sizes, zlib.crc32(head)))


def _check_byteorder() -> None:
    if sys.byteorder != "little":
        raise FrameError("frames hold little-endian numbers, and this machine is big-endian: it cannot take part")


class _Header(NamedTuple):
    kind: str
    dtype: int
    dims: int
    flags: int
    step: int
    sequence: int
    size: int
    packed: bytes
    check: int

    @property
    def message(self) -> tuple[int, int, bool]:
        return self.step, self.sequence, bool(self.flags & _EVALUATION)


class MessageReader:
    """Turns bytes into messages, of at most ``limit`` bytes apart from headers; accepts nothing after an error."""

    def __init__(self, limit: int, ledger: ByteLedger | None = None) -> None:
        _check_byteorder()
        self.limit, self.ledger = limit, ledger
        self._buffer = bytearray()
        self._frame: _Header | None = None
        self._broken = False
        self._begin()

    def _begin(self) -> None:
        self._first: _Header | None = None
        self._parts: list[tuple[str, Tensor]] = []
        self._fields: Fields | None = None
        self._held = 0

    @property
    def middle(self) -> bool:
        return bool(self._buffer) or self._frame is not None or self._first is not None

    def feed(self, data: bytes) -> list[Message]:
        """Take in bytes; return the messages that they complete; refuse damaged ones and those over the limit."""
        if self._broken:
            raise FrameError("bytes after a broken frame")
        self._buffer += data
        done = []
        try:
            while (frame := self._next()) is not None:
                if frame.flags & _LAST:
                    done.append(self._ended())
        except FrameError:
            self._broken = True
            self._buffer.clear()
            raise
        return done

    def _next(self) -> _Header | None:
        if self._frame is None and len(self._buffer) >= HEADER_BYTES:
            self._frame = self._header(self._take(HEADER_BYTES))
        frame = self._frame
        if frame is None or len(self._buffer) < 4 * frame.dims + frame.size:
            return None
        sizes, payload = self._take(4 * frame.dims), self._take(frame.size)
        if _checksum(frame.packed, sizes, payload) != frame.check:
            raise FrameError(f"the checksum of a frame {frame.kind!r} is wrong: it was damaged on the way")
        self._store(frame, struct.unpack(f">{frame.dims}I", sizes), payload)
        self._frame = None
        return frame

    def _ended(self) -> Message:
        assert self._first is not None
        step, sequence, evaluation = self._first.message
        message = Message(self._first.kind, step, sequence, evaluation, tuple(self._parts), self._fields)
        self._begin()
        if self.ledger is not None:
            self.ledger.count(message, self.ledger.received)
        return message

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _header(self, raw: bytes) -> _Header:
        magic, kind, dtype, dims, flags, step, sequence, size = HEADER.unpack(raw[: HEADER.size])
        (check,) = CHECKSUM.unpack(raw[HEADER.size :])
        if magic != MAGIC:
            raise FrameError("what arrived is not a frame of thinwire split: is another program using this port?")
        if not 1 <= kind <= len(KINDS) or (dtype not in DTYPES and dtype != _TEXT):
            raise FrameError(f"a frame of kind {kind} and dtype {dtype} is unknown: the ends run different versions")
        if dims > _MOST_DIMENSIONS or flags & ~(_LAST | _EVALUATION) or (dtype == _TEXT and dims):
            raise FrameError(f"a frame with {dims} dimensions and flags {flags} is malformed")
        if size > (_MOST_TEXT if dtype == _TEXT else self.limit - self._held):
            raise FrameError(f"a frame of {size} bytes is over the limit of {self.limit} per message")
        frame = _Header(KINDS[kind - 1], dtype, dims, flags, step, sequence, size, raw[: HEADER.size], check)
        if self._first is not None:
            if frame.message != self._first.message or dtype == _TEXT or self._fields is not None:
                raise FrameError(f"a frame {frame.kind!r} does not belong to the message it came in")
            if len(self._parts) >= _MOST_FRAMES:
                raise FrameError(f"a message of more than {_MOST_FRAMES} frames")
        return frame

    def _store(self, frame: _Header, dims: tuple[int, ...], payload: bytes) -> None:
        self._first = self._first or frame
        self._held += frame.size
        if frame.dtype == _TEXT:
            try:
                self._fields = json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise FrameError(f"a control message is not JSON: {error}") from error
            if not isinstance(self._fields, dict):
                raise FrameError("a control message is not a JSON object")
            return
        dtype = DTYPES[frame.dtype]
        if math.prod(dims) * dtype.itemsize != frame.size:
            raise FrameError(f"a frame of {frame.size} bytes cannot hold {list(dims)} numbers of {dtype}")
        flat = torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)
        try:
            self._parts.append((frame.kind, flat.view(dims)))
        except RuntimeError as error:  # an empty tensor with absurd dimensions
            raise FrameError(f"a frame cannot have the dimensions {list(dims)}") from error
