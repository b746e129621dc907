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
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from stat import S_ISREG

import numpy as np


def store(table: mmap.mmap, at: int, value: int, size: int) -> None:
    """Store an aligned unsigned number of 4 or 8 bytes: readers see the old or the new value, even after a kill."""
    table[at : at + size] = value.to_bytes(size, "little")  # struct.pack_into would write zeros first


@dataclass(frozen=True)
class CacheStats:
    """Counters of all workers and ranks of a node together, since the arena was created.

    Subtract two of them for the time in between: ``dataset.stats() - before``.

    Attributes:
        hits_memory, hits_disk, reads_source: samples read from the arena; from local disk, and decoded again; from the
            source.
        bytes_memory, bytes_disk, bytes_source: their bytes; of the source's, only bytes, text, numbers and tensors.
        decode_nanoseconds: time spent in the prefix.
        admitted, refused: samples added to the arena, and those for which it had no room.
    """

    hits_memory: int = 0
    hits_disk: int = 0
    reads_source: int = 0
    bytes_memory: int = 0
    bytes_disk: int = 0
    bytes_source: int = 0
    decode_nanoseconds: int = 0
    admitted: int = 0
    refused: int = 0

    @property
    def samples(self) -> int:
        return self.hits_memory + self.hits_disk + self.reads_source

    @property
    def hit_rate(self) -> float:
        """Fraction of the samples that came from the arena; 0 if none was requested."""
        return self.hits_memory / self.samples if self.samples else 0.0

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(a - b for a, b in zip(astuple(self), astuple(other))))


ROWS = 1024
_NAMES = [field.name for field in fields(CacheStats)]
_ROW = struct.Struct(f"<{len(_NAMES)}q")
COUNTER_BYTES = ROWS * _ROW.size


class CacheCounters:
    """One row of counters per process, in a mapped file; their sum is that of the node.

    A process owns the row on whose byte it holds a lock. The kernel releases it when the process ends, for whatever
    reason, and the next process continues counting in that row.
    """

    def __init__(self, file: int, table: mmap.mmap, base: int) -> None:
        self._file, self._table, self._base = file, table, base
        self.renew()

    def renew(self) -> None:
        """Forget the row: after a fork it is the parent's."""
        self._row: int | None = None
        self._mutex = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._mutex:
            if self._row is None:
                self._row = self._claim()
            for name, amount in amounts.items():
                place = self._row + 8 * _NAMES.index(name)
                (value,) = struct.unpack_from("<q", self._table, place)
                store(self._table, place, value + amount, 8)

    def total(self) -> CacheStats:
        rows = _ROW.iter_unpack(self._table[self._base : self._base + COUNTER_BYTES])
        return CacheStats(*(sum(column) for column in zip(*rows)))

    def _claim(self) -> int:
        for row in range(ROWS):
            place = self._base + row * _ROW.size
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            else:
                return place
        raise RuntimeError(f"more than {ROWS} processes on this machine share one cache")


DATA_PAGE = 4096
HEADER = 4096
SLOTS_AT = HEADER + COUNTER_BYTES
SLOT = struct.Struct("<16sQQII")  # key, offset, length, crc32, state
_MAGIC = b"thinwire"
_FIXED = struct.Struct("<8sIQ")  # magic, layout, slots; followed by their checksum
_LAYOUT = 1
_USED_AT, _ALLOCATED_AT = 64, 72


def table_bytes(slots: int) -> int:
    """Return the bytes before the data: whole pages."""
    return -(-(SLOTS_AT + slots * SLOT.size) // DATA_PAGE) * DATA_PAGE


@dataclass(frozen=True)
class Header:
    """The file's first bytes: slots of the table (fixed); bytes reserved for values or before them, and promised."""

    slots: int
    used: int
    allocated: int

    @classmethod
    def read(cls, table: mmap.mmap | bytes) -> Header:
        if len(table) < HEADER:
            raise ValueError("too short")
        magic, layout, slots = _FIXED.unpack_from(table, 0)
        (crc,) = struct.unpack_from("<I", table, _FIXED.size)
        used, allocated = struct.unpack_from("<QQ", table, _USED_AT)
        if magic != _MAGIC or layout != _LAYOUT or crc != zlib.crc32(table[: _FIXED.size]):
            raise ValueError("not a header of this layout")
        if not table_bytes(slots) <= used <= allocated:
            raise ValueError("its sizes contradict one another")
        return cls(slots, used, allocated)


def open_file(path: Path, slots: int) -> tuple[int, Header]:
    """Open an arena's file, or create it: (descriptor, header). If several processes try, one creates it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the cache's directory {path.parent} does not exist")
    with _only_one(path.with_suffix(".lock")):
        try:
            file = _open_own(path)
        except FileNotFoundError:
            return _make(path, slots)
        try:
            header = Header.read(os.pread(file, HEADER, 0))
            if os.fstat(file).st_size < header.allocated:
                raise ValueError("the file is shorter than its header says")
        except ValueError as error:
            aside = path.with_suffix(".damaged")
            warnings.warn(
                f"the cache {path} is damaged ({error}); it is kept as {aside}, and a new one is made", stacklevel=2
            )
            os.replace(path, aside)
            os.close(file)
            return _make(path, slots)
        return file, header


def _make(path: Path, slots: int) -> tuple[int, Header]:
    """Create the file under another name first, so that the file at ``path`` is always complete."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # left by a killed process; we hold the lock
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size = table_bytes(slots)
        os.posix_fallocate(file, 0, size)
        fixed = _FIXED.pack(_MAGIC, _LAYOUT, slots)
        os.pwrite(file, fixed + struct.pack("<I", zlib.crc32(fixed)), 0)
        os.pwrite(file, struct.pack("<QQ", size, size), _USED_AT)
        os.replace(partial, path)
    except BaseException:
        os.close(file)
        partial.unlink(missing_ok=True)
        raise
    return file, Header(slots, size, size)


def _open_own(path: Path, more: int = 0) -> int:
    """Open a file in a folder that others may write to: one that is a link, or that somebody else left, is refused."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | more, 0o600)
    status = os.fstat(file)
    if status.st_uid == os.geteuid() and S_ISREG(status.st_mode):
        return file
    os.close(file)
    raise PermissionError(f"the cache's file {path} belongs to another user, or is no file: use another directory")


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    file = _open_own(path, os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


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
        """Return this process's arena at ``path``; nothing is added beyond ``limit`` bytes of the whole file."""
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
        """Store a value. True: stored; False: no room, neither now nor later; None: the key was already there."""
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

    def held(self) -> int:  # number of values
        kind = np.dtype([("key", "V16"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"), ("state", "<u4")])
        slots = np.frombuffer(self.table[SLOTS_AT : self._end], dtype=kind, count=self.slots)
        return int((slots["state"] == READY).sum())

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
                store(self.table, _ALLOCATED_AT, wanted, 8)  # after the space is reserved
            store(self.table, _USED_AT, end, 8)
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
        if len(self._data) < end <= (allocated := Header.read(self.table).allocated):
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
