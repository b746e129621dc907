"""Numbers in a map that processes share: stored in one piece, whoever reads or is killed meanwhile."""

from __future__ import annotations

import mmap


def store(table: mmap.mmap, at: int, value: int, size: int) -> None:
    """An unsigned number of 4 or 8 bytes, aligned: others see, and a kill leaves, the old value or the new one.

    ``struct.pack_into`` writes zeros first.
    """
    table[at : at + size] = value.to_bytes(size, "little")
