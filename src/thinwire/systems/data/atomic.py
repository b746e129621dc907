"""Numbers in a map shared by processes: stored atomically, even if a process reads or is killed meanwhile."""

from __future__ import annotations

import mmap


def store(table: mmap.mmap, at: int, value: int, size: int) -> None:
    """Store an aligned unsigned number of 4 or 8 bytes: readers see the old or the new value, even after a kill.

    ``struct.pack_into`` would write zeros first.
    """
    table[at : at + size] = value.to_bytes(size, "little")
