"""The file of an arena: its header, its atomic creation, and the handling of a damaged file."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from thinwire.systems.data.atomic import store
from thinwire.systems.data.stats import BYTES as COUNTER_BYTES

DATA_PAGE = 4096
HEADER = 4096
SLOTS_AT = HEADER + COUNTER_BYTES
SLOT_BYTES = 40
_MAGIC = b"thinwire"
_FIXED = struct.Struct("<8sIQ")  # magic, layout, slots; followed by their checksum
_LAYOUT = 1
_USED_AT, _ALLOCATED_AT = 64, 72


def table_bytes(slots: int) -> int:
    """Return the bytes before the data: header, counters, slots; whole pages."""
    return -(-(SLOTS_AT + slots * SLOT_BYTES) // DATA_PAGE) * DATA_PAGE


@dataclass(frozen=True)
class Header:
    """The header.

    Attributes:
        slots: slots of the table; fixed.
        used: bytes of the file reserved for values, or before them.
        allocated: bytes of the file for which the file system has promised space.
    """

    slots: int
    used: int
    allocated: int

    @classmethod
    def read(cls, table: mmap.mmap | bytes) -> Header:
        """Read the header from the beginning of the file.

        Raises:
            ValueError: it is not a header.
        """
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

    @staticmethod
    def store_used(table: mmap.mmap, value: int) -> None:
        """Store the value; the header's lock must be held."""
        store(table, _USED_AT, value, 8)

    @staticmethod
    def store_allocated(table: mmap.mmap, value: int) -> None:
        """Store the value after the space is reserved; the header's lock must be held."""
        store(table, _ALLOCATED_AT, value, 8)


def open_file(path: Path, slots: int) -> tuple[int, Header]:
    """Open an arena's file, or create it. If several processes try, one creates it.

    Returns:
        (descriptor, header).

    Raises:
        FileNotFoundError, PermissionError: for the folder or the file, with its path.
    """
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
