"""The counters of a cache, and their place in shared memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import struct
import threading
from dataclasses import astuple, dataclass, fields

from thinwire.systems.data.atomic import store


@dataclass(frozen=True)
class CacheStats:
    """Counters of all workers and ranks of a node together, since the arena was created.

    Subtract two of them for the time in between: ``dataset.stats() - before``.

    Attributes:
        hits_memory: samples read from the arena.
        hits_disk: samples read from local disk, decoded again.
        reads_source: samples read from the source.
        bytes_memory: bytes read from the arena.
        bytes_disk: bytes read from local disk.
        bytes_source: bytes of the samples from the source, counting only bytes, text, numbers and tensors.
        decode_nanoseconds: time spent in the prefix.
        admitted: samples added to the arena.
        refused: samples for which it had no room.
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

    @property
    def decode_seconds(self) -> float:
        """Seconds spent in the prefix, summed over processes."""
        return self.decode_nanoseconds / 1e9

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(a - b for a, b in zip(astuple(self), astuple(other))))


ROWS = 1024
_NAMES = [field.name for field in fields(CacheStats)]
_ROW = struct.Struct(f"<{len(_NAMES)}q")
BYTES = ROWS * _ROW.size


class CacheCounters:
    """One row of counters per process, in a mapped file; their sum is that of the node.

    A process owns the row on whose byte it holds a lock. The kernel releases the lock when the process ends, for
    whatever reason, and the next process continues counting in that row: nothing is lost and no row is leaked.

    Args:
        file: descriptor of the file, for locks.
        table: the mapped file.
        base: byte where the rows begin.
    """

    def __init__(self, file: int, table: mmap.mmap, base: int) -> None:
        self._file, self._table, self._base = file, table, base
        self.renew()

    def renew(self) -> None:
        """Forget the row: after a fork it is the parent's."""
        self._row: int | None = None
        self._mutex = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to this process's counters.

        Raises:
            RuntimeError: more processes than there are rows.
        """
        with self._mutex:
            if self._row is None:
                self._row = self._claim()
            for name, amount in amounts.items():
                place = self._row + 8 * _NAMES.index(name)
                (value,) = struct.unpack_from("<q", self._table, place)
                store(self._table, place, value + amount, 8)

    def total(self) -> CacheStats:
        """Return the sum over all processes, including ended ones."""
        rows = _ROW.iter_unpack(self._table[self._base : self._base + BYTES])
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
