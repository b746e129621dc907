"""Typed, bounded messages: frozen records as frames of sixteen 64-bit integers. Nothing that arrives is unpickled."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, get_args, get_type_hints

FRAME = struct.Struct("<16q")
ROW_BYTES = 32
MOST_ROWS = 1 << 16
_MOST = 1 << 62

FiniteFloat = Annotated[float, "finite"]
Hash64 = Annotated[int, "of a hash"]
_Fields = tuple[tuple[str, Any], ...]


class Codec:
    """Encodes records of some kinds, and refuses everything else that arrives.

    A kind is a frozen dataclass of up to thirteen numbers, told apart by their annotations: ``int`` (at most 2**62),
    ``Hash64`` (any 64 bits), ``bool``, ``float``, ``FiniteFloat``. After the frame follow ``rows``, if the kind has a
    field of that name, a tuple of records with up to four numbers, and ``tensor``, bytes of which the frame tells the
    number; a ``tensor`` without a default must come. ``of``: what the messages belong to, for errors. ``kinds``: in an
    order that both sides share.
    """

    def __init__(self, of: str, kinds: Sequence[type]) -> None:
        self.of, self.kinds = of, tuple(kinds)
        self._number = {kind: place for place, kind in enumerate(kinds)}
        self._fields: dict[type, _Fields] = {kind: _numbers_of(kind) for kind in kinds}
        self._row: dict[type, type] = {}
        self._tensor: dict[type, bool] = {}  # whether it must come
        for kind in kinds:
            if rows := get_args(get_type_hints(kind).get("rows")):
                self._row[kind] = rows[0]
                self._fields[rows[0]] = _numbers_of(rows[0])
            for field in fields(kind):
                if field.name == "tensor":
                    self._tensor[kind] = field.default is MISSING

    def encode(self, message: Any, rows: int | None = None, tensor_bytes: int = 0) -> bytes:
        """Return the frame of a message, and its rows after it; ``rows``: how many it announces, by default all."""
        kind, table = type(message), array("q")
        for row in getattr(message, "rows", ()):
            numbers = self._numbers(row)
            table.extend([*numbers, *[0] * (4 - len(numbers))])
        count = len(table) // 4 if rows is None else rows
        values = [self._number[kind], count, tensor_bytes, *self._numbers(message)]
        return FRAME.pack(*values, *[0] * (16 - len(values))) + table.tobytes()

    def decode(self, frame: bytes) -> tuple[Any, int, int]:
        """Return the message of a frame, and the number of rows and of tensor bytes that follow it."""
        number, rows, tensor_bytes, *values = FRAME.unpack(frame) if len(frame) == FRAME.size else (-1, 0, 0)
        if not 0 <= number < len(self.kinds) or rows < 0 or tensor_bytes < 0:
            raise ValueError(f"what arrived is not a message of {self.of}: is another program using the port?")
        kind, wrong = self.kinds[number], ""
        if rows and kind not in self._row:
            wrong = "with rows"
        elif rows > MOST_ROWS:
            wrong = f"with {rows} rows"
        elif tensor_bytes and kind not in self._tensor:
            wrong = "with a tensor"
        elif not tensor_bytes and self._tensor.get(kind):
            wrong = "without a tensor"
        if wrong:
            raise ValueError(f"a {kind.__name__} {wrong} is not a message of {self.of}")
        found = self._read(kind, values, _MOST)
        return kind(**found, **({"tensor": None} if self._tensor.get(kind) else {})), rows, tensor_bytes

    def with_rows(self, message: Any, table: bytes) -> Any:
        """Return a message with the rows that followed it. ``ValueError``: a number in them is out of range."""
        kind, numbers = self._row[type(message)], array("q", table).tolist()
        rows = [self._read(kind, numbers[i : i + 4], _MOST - 1) for i in range(0, len(numbers), 4)]  # + 1 must fit too
        return replace(message, rows=tuple(kind(**row) for row in rows))

    def _numbers(self, record: Any) -> list[int]:
        values = [(getattr(record, name), hint) for name, hint in self._fields[type(record)]]
        return [
            struct.unpack("<q", struct.pack("<d", value))[0] if hint in (float, FiniteFloat) else int(value)
            for value, hint in values
        ]

    def _read(self, kind: type, values: Sequence[int], most: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for (name, hint), number in zip(self._fields[kind], values):
            if hint in (float, FiniteFloat):
                (found[name],) = struct.unpack("<d", struct.pack("<q", number))
                if hint is FiniteFloat and not math.isfinite(found[name]):
                    raise ValueError(f"a {kind.__name__} with {name}={found[name]} is not a message of {self.of}")
                continue
            if hint is not Hash64 and not -most <= number <= most:
                raise ValueError(f"{number} in a message is larger than anything that {self.of} counts")
            found[name] = bool(number) if hint is bool else number
        return found


def _numbers_of(kind: type) -> _Fields:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in fields(kind) if field.name not in ("rows", "tensor"))
