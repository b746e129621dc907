"""Byte strings in one block of memory of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE = 512
_ENTRY = 1024  # bytes for the record of an entry, here and in its user


@dataclass(frozen=True)
class Stored:
    """The place of a byte string."""

    pages: NDArray[np.int32]
    length: int

    @property
    def cost(self) -> int:
        """Bytes of memory it takes, including its record."""
        return len(self.pages) * PAGE + _ENTRY


class Pages:
    """A block of memory cut into pages of 512 bytes; a byte string may use any of them.

    With separate tensors, states of clients took up to 1.6 times their bytes, because memory that one thread allocates
    and another frees leaves holes. A block has no holes, and only pages that were used take memory.

    Args:
        memory_bytes: for the block and the records of its entries.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.used = 0
        self._memory: NDArray[np.uint8] | None = None
        self._free: list[int] = []
        self._touched = 0

    def room_for(self, length: int) -> bool:
        """Return whether a byte string of this length fits now."""
        return self.used + -(-length // PAGE) * PAGE + _ENTRY <= self.memory_bytes

    def put(self, data: bytes) -> Stored:
        """Store a copy.

        Raises:
            MemoryError: there is no room.
        """
        if not self.room_for(len(data)):
            raise MemoryError(f"{len(data)} bytes do not fit: {self.used} of {self.memory_bytes} bytes are taken")
        if self._memory is None:
            self._memory = np.empty((self.memory_bytes // PAGE, PAGE), dtype=np.uint8)
        count = -(-len(data) // PAGE)
        reused = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(reused)]
        taken.extend(range(self._touched, self._touched + count - reused))
        self._touched += count - reused
        stored = Stored(np.array(taken, dtype=np.int32), len(data))
        whole, rest = divmod(len(data), PAGE)
        content = np.frombuffer(data, dtype=np.uint8)
        self._memory[stored.pages[:whole]] = content[: whole * PAGE].reshape(whole, PAGE)
        if rest:
            self._memory[stored.pages[-1], :rest] = content[whole * PAGE :]
        self.used += stored.cost
        return stored

    def get(self, stored: Stored) -> bytes:
        """Return a copy of what was stored."""
        if self._memory is None:
            return b""
        return self._memory[stored.pages].tobytes()[: stored.length]

    def free(self, stored: Stored) -> None:
        """Make its pages available again."""
        self._free.extend(stored.pages.tolist())
        self.used -= stored.cost
