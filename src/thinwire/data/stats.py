"""The counters of a cache, and their place in shared memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import struct
import threading
from dataclasses import astuple, dataclass, fields

from thinwire.data.atomic import store


@dataclass(frozen=True)
class CacheStats:
    """What a node's workers and ranks did, all together, since the arena was made.

    Subtract two of them for what happened in between: ``dataset.stats() - before``.

    Attributes:
        hits_memory: samples from the arena.
        hits_disk: samples from local disk, decoded again.
        reads_source: samples from the source.
        bytes_memory: read from the arena.
        bytes_disk: read from local disk.
        bytes_source: of the samples that the source gave, without what is not bytes, text, numbers or tensors.
        decode_nanoseconds: spent in the prefix.
        admitted: samples that were put into the arena.
        refused: samples that found no room in it.
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
        """Share of the samples that came from the arena; 0 if none was asked for."""
        return self.hits_memory / self.samples if self.samples else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds spent in the prefix, added over processes."""
        return self.decode_nanoseconds / 1e9

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(a - b for a, b in zip(astuple(self), astuple(other))))


ROWS = 1024
_NAMES = [field.name for field in fields(CacheStats)]
_ROW = struct.Struct(f"<{len(_NAMES)}q")
BYTES = ROWS * _ROW.size


class CacheCounters:
    """One row of counters per process, in a mapped file; their sum is the node's.

    A process owns the row whose byte it holds a lock on. The kernel drops the lock when the process ends, however it
    ends, and the next process goes on counting in that row: nothing is lost and no row is leaked.

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
        """The sum over all processes, ended ones too."""
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
        raise RuntimeError(f"more than {ROWS} processes of this machine share one cache")
