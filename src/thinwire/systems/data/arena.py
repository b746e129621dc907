"""A memory-mapped file of byte strings shared by all processes of a machine: filled once, never evicted.

The file holds a header, rows of counters, a slot table (open addressing on the key), then the data. Space is reserved
on the file system before it is mapped, since a store into a hole of a full tmpfs kills the process with SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from thinwire.systems.data.arena_file import DATA_PAGE, HEADER, SLOTS_AT, Header, open_file, table_bytes
from thinwire.systems.data.atomic import store
from thinwire.systems.data.stats import CacheCounters

SLOT = struct.Struct("<16sQQII")  # key, offset, length, crc32, state
EMPTY, FILLING, READY = 0, 1, 2
_CHUNK = 16 << 20
_PROBES = 256  # at 2/3 full, one key in 10^8 needs more
_OFFSET_AT, _LENGTH_AT, _CRC_AT, _STATE_AT = 16, 24, 32, 36
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_arenas: dict[Path, Arena] = {}
_guard = threading.Lock()


class Arena:
    """The arena at a path. Get it with :meth:`open`; a process has one object per path.

    Only one, because closing *any* descriptor of a file drops all locks that the process holds on it.

    A writer holds the lock of the slot, which the kernel releases if the process is killed. A slot becomes READY only
    after all of it is written, and its checksum is compared when a process first reads it: data left by a killed writer
    is never served, and the next writer of that key takes over the slot.
    """

    def __init__(self, path: Path, slots: int, limit: int) -> None:
        self.path, self.limit = path, limit
        self._file, header = open_file(path, slots)
        self.slots = header.slots
        self._end = table_bytes(self.slots)
        self.table = mmap.mmap(self._file, self._end)
        self._data = self.table  # grows later
        self._checked = bytearray(self.slots)
        self._mutex = threading.Lock()  # threads of one process share its file locks
        self.users = 0
        self.counters = CacheCounters(self._file, self.table, HEADER)

    @classmethod
    def open(cls, path: Path, slots: int, limit: int) -> Arena:
        """Return this process's arena at ``path``; create the file if it does not exist.

        Args:
            path: path of the file; its folder must exist.
            slots: number of keys, if the file is created now.
            limit: size of the whole file in bytes, above which this process adds nothing more.
        """
        with _guard:
            arena = _arenas.get(path)
            if arena is None:
                arena = _arenas[path] = cls(path, slots, limit)
            arena.limit = limit
            arena.users += 1
            return arena

    def close(self) -> None:
        """Release it; the last user in a process closes the file."""
        with _guard:
            self.users -= 1
            if self.users == 0:
                del _arenas[self.path]
                self._data.close()
                self.table.close()
                os.close(self._file)

    def get(self, key: bytes, *, always: bool = False) -> bytes | None:
        """Return the value of a key, or None. ``always``: compare its checksum at every read, not only at the first."""
        for index in self._probe(key):
            held, offset, length, crc, state = self._slot(index)
            if state == EMPTY:
                return None
            if held == key:
                if state != READY:
                    return None
                _, offset, length, crc, _ = self._slot(index)  # READY was seen: the rest is written
                value = self._read(offset, length)
                if always or not self._checked[index]:
                    if zlib.crc32(value) != crc:
                        return self._recheck(index)
                    self._checked[index] = 1
                return value
        return None

    def put(self, key: bytes, value: bytes) -> bool | None:
        """Store a value.

        Returns:
            True: stored. False: no room, neither now nor later. None: the key was already there.
        """
        crc = zlib.crc32(value)
        with self._mutex:
            for index in self._probe(key):
                state, held = self._slot(index)[4], self._slot(index)[0]  # read in this order: keys are written first
                if state != EMPTY and held != key:
                    continue
                if state == READY:
                    return None
                with self._locked(index):
                    held, offset, length, _, state = self._slot(index)  # it may have changed while we waited
                    if state != EMPTY and held != key:
                        continue
                    if state == READY:
                        return None
                    if state == EMPTY or length < len(value):  # else: reuse a killed writer's space
                        reserved = self._reserve(len(value))
                        if reserved is None:
                            return False
                        offset = reserved
                    self._fill(index, key, offset, value, crc)
                    return True
        return False

    def renew(self) -> None:
        """Prepare a forked child: descriptors and maps stay valid, the mutex and the counters' row are the parent's."""
        self._mutex = threading.Lock()
        self.counters.renew()

    def held(self) -> tuple[int, int]:
        """Return (number of values, their total bytes)."""
        kind = np.dtype([("key", "V16"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"), ("state", "<u4")])
        slots = np.frombuffer(self.table[SLOTS_AT : self._end], dtype=kind, count=self.slots)
        ready = slots["state"] == READY
        return int(ready.sum()), int(slots["length"][ready].sum())

    def _fill(self, index: int, key: bytes, offset: int, value: bytes, crc: int) -> None:
        """Fill a slot. The order of the stores is essential: a kill between any two leaves EMPTY or FILLING."""
        at = SLOTS_AT + index * SLOT.size
        self.table[at : at + _OFFSET_AT] = key
        store(self.table, at + _OFFSET_AT, offset, 8)  # before the length, so the space never seems longer than it is
        store(self.table, at + _LENGTH_AT, len(value), 8)
        store(self.table, at + _STATE_AT, FILLING, 4)
        self._cover(offset + len(value))
        self._data[offset : offset + len(value)] = value
        store(self.table, at + _CRC_AT, crc, 4)
        store(self.table, at + _STATE_AT, READY, 4)

    def _reserve(self, length: int) -> int | None:
        """Reserve space for a value; None if there is none. A process killed right after this leaks the space, once."""
        with self._locked(-1):
            header = Header.read(self.table)
            start, end = header.used, header.used + -(-length // 64) * 64
            if end > self.limit:
                return None
            allocated = header.allocated
            if end > allocated:
                wanted = min(max(end, allocated + _CHUNK), self.limit)
                wanted = -(-wanted // DATA_PAGE) * DATA_PAGE
                try:
                    os.posix_fallocate(self._file, allocated, wanted - allocated)
                except OSError as error:
                    if error.errno in _NO_SPACE:
                        return None
                    raise
                Header.store_allocated(self.table, wanted)
            Header.store_used(self.table, end)
            return start

    def _recheck(self, index: int) -> bytes | None:
        """With the slot's lock held: return the value if it is complete after all; else None, to be filled again."""
        with self._mutex, self._locked(index):
            _, offset, length, crc, state = self._slot(index)
            value = self._read(offset, length)
            if state == READY and zlib.crc32(value) == crc:
                return value
            store(self.table, SLOTS_AT + index * SLOT.size + _STATE_AT, FILLING, 4)
            return None

    def _probe(self, key: bytes) -> Iterator[int]:
        """Yield the slots in which a key may be. The first empty one ends a search: no slot becomes empty again."""
        start = int.from_bytes(key[:8], "little") % self.slots
        for step in range(min(self.slots, _PROBES)):
            yield (start + step) % self.slots

    def _slot(self, index: int) -> tuple[bytes, int, int, int, int]:
        slot: tuple[bytes, int, int, int, int] = SLOT.unpack_from(self.table, SLOTS_AT + index * SLOT.size)
        return slot

    def _read(self, offset: int, length: int) -> bytes:
        self._cover(offset + length)
        return self._data[offset : offset + length]  # a copy; too short, and so refused, if the slot is damaged

    def _cover(self, end: int) -> None:
        """Map the file's data up to ``end``, if the file is that long."""
        if end > len(self._data):
            allocated = Header.read(self.table).allocated
            if end <= allocated:
                self._data = mmap.mmap(self._file, allocated)  # the old map is freed with its last reader

    @contextmanager
    def _locked(self, index: int) -> Iterator[None]:
        """Hold the lock of a slot between processes; -1: of the header."""
        at = SLOTS_AT + index * SLOT.size if index >= 0 else 0
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, at)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    for arena in _arenas.values():
        arena.renew()


os.register_at_fork(after_in_child=_after_fork)
