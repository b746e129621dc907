"""From a key to a prefix value: from the arena, else local disk, else the source; with counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.systems.data.arena import Arena
from thinwire.systems.data.arena_file import table_bytes
from thinwire.systems.data.disk import DiskStore
from thinwire.systems.data.memory import budget
from thinwire.systems.data.stats import CacheStats
from thinwire.systems.data.values import pack, size_of, unpack

Read = Callable[[], Any]


class Levels:
    """The levels below a data set. When it is sent to another process, it opens the arena again there.

    Args:
        prefix: raw sample -> value.
        path: path of the arena's file.
        slots: number of slots of a new arena.
        limit: size limit of the arena's file in bytes.
        disk: the second level; None: there is none.
        check: "first" or "always": how often a process compares a value's checksum.
    """

    def __init__(
        self, prefix: Callable[[Any], Any], path: Path, slots: int, limit: int, disk: DiskStore | None, check: str
    ) -> None:
        self.prefix, self.path, self.slots, self.limit, self.disk, self.check = prefix, path, slots, limit, disk, check
        self._arena: Arena | None = Arena.open(path, slots, limit)
        self._closed = False

    @classmethod
    def within(
        cls,
        memory_bytes: int | str,
        directory: str | Path,
        name: str,
        prefix: Callable[[Any], Any],
        *,
        capacity: int,
        disk: DiskStore | None = None,
        check: str = "first",
    ) -> Levels:
        """Create levels with an arena for that many samples, within a budget.

        Raises:
            ValueError: a budget too large for the machine or too small for the table, or an unknown ``check``.
            FileNotFoundError, PermissionError: for ``directory``.
        """
        if check not in ("first", "always"):
            raise ValueError(f'check={check!r} must be "first" or "always"')
        path = Path(directory) / f"{name}.arena"
        limit = budget(memory_bytes, path.parent, path.stat().st_blocks * 512 if path.exists() else 0)
        slots = max(16, 3 * capacity // 2)
        if limit <= table_bytes(slots):
            raise ValueError(
                f"memory_bytes={limit} leaves no room for samples: the table for {capacity} of them alone takes "
                f"{table_bytes(slots)} bytes"
            )
        return cls(prefix, path, slots, limit, disk, check)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arena": None}

    @property
    def arena(self) -> Arena:
        """This process's arena.

        Raises:
            ValueError: after :meth:`close`.
        """
        if self._arena is None:
            if self._closed:
                raise ValueError("this cache is closed: make a new CachedDataset")
            self._arena = Arena.open(self.path, self.slots, self.limit)
        return self._arena

    def value(self, key: bytes, raw_key: bytes, read: Read, *, store: bool = True) -> Any:
        """Return the prefix value of a sample.

        Args:
            key: key of the value.
            raw_key: key of the sample as the source gives it.
            read: reads it from the source.
            store: False for a sample of another node's part, which is not kept here.
        """
        arena = self.arena
        if store:
            packed = arena.get(key, always=self.check == "always")
            if packed is not None:
                arena.counters.add(hits_memory=1, bytes_memory=len(packed))
                return unpack(packed)
        raw = self._raw(raw_key, read, store)
        begin = time.perf_counter_ns()
        value = self.prefix(raw)
        spent = time.perf_counter_ns() - begin
        packed = pack(value)
        admitted = arena.put(key, packed) if store else None
        arena.counters.add(decode_nanoseconds=spent, admitted=admitted is True, refused=admitted is False)
        return unpack(packed)  # same as for a hit: new memory, the same strides

    def _raw(self, raw_key: bytes, read: Read, store: bool) -> Any:
        disk = self.disk if store else None
        kept = disk.get(raw_key) if disk is not None else None
        if kept is not None:
            self.arena.counters.add(hits_disk=1, bytes_disk=len(kept))
            return unpack(kept)
        raw = read()
        if disk is not None:
            disk.put(raw_key, pack(raw))
        self.arena.counters.add(reads_source=1, bytes_source=size_of(raw))
        return raw

    def stats(self) -> CacheStats:
        """Return the counters of all processes on this machine."""
        return self.arena.counters.total()

    def close(self, *, delete: bool = False) -> None:
        """Release the arena; ``delete``: also remove its file."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._closed = True
        if delete:
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".lock").unlink(missing_ok=True)
