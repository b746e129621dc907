"""From a key to a prefix value: from the arena, else local disk, else the source; with counters."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.core.checks import check_choice
from thinwire.systems.data.arena import Arena, table_bytes
from thinwire.systems.data.values import pack, size_of, unpack

_SHARE, _AUTO_SHARE = 0.9, 0.5


def room(directory: Path, root: Path = Path("/")) -> dict[str, int]:
    """Return the free bytes by their limit: memory, the control group, the file system of ``directory``."""
    bounds = {}
    table = root / "proc/meminfo"
    if not table.exists():
        raise OSError("a data cache needs Linux: its memory is a file on a tmpfs, reserved with posix_fallocate")
    for line in table.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            bounds["free memory"] = 1024 * int(line.split()[1])
    group = _group_room(root)
    if group is not None:
        bounds["left under the cgroup limit"] = group
    if directory.is_dir():
        status = os.statvfs(directory)
        bounds[f"free space in {directory}"] = status.f_bavail * status.f_frsize
    return bounds


def budget(memory_bytes: int | str, directory: Path, held: int, root: Path = Path("/")) -> int:
    """Return the size of an arena in bytes: as requested, at most nine tenths of what is free or held; "auto": half."""
    bounds = {what: free + held for what, free in room(directory, root).items()}
    tightest = min(bounds, key=lambda what: bounds[what])
    if memory_bytes == "auto":
        return int(_AUTO_SHARE * bounds[tightest])
    if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes <= 0:
        raise ValueError(f'memory_bytes={memory_bytes!r} must be a positive number of bytes or "auto"')
    if memory_bytes > _SHARE * bounds[tightest]:
        raise ValueError(
            f"memory_bytes={memory_bytes} is more than nine tenths of the {bounds[tightest]} bytes {tightest}: ask for "
            f'at most {int(_SHARE * bounds[tightest])}, or use memory_bytes="auto"'
        )
    return memory_bytes


def _group_room(root: Path) -> int | None:
    """Return limit minus use of the tightest control group of this process; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, use, inactive = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, use, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = top / path.strip("/")
        while True:  # a group is bound by its ancestors too; in a container only the last may be visible
            try:
                most = (folder / limit).read_text().strip()
                if most != "max" and int(most) < 1 << 60:  # version 1 writes a huge number for no limit
                    taken = int((folder / use).read_text())
                    statistics = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    found.append(int(most) - taken + int(statistics.get(inactive, 0)))  # page cache can be reclaimed
            except OSError:
                pass
            if folder == top:
                break
            folder = folder.parent
    return max(0, min(found)) if found else None


_CRC = struct.Struct("<I")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORGOTTEN_SECONDS = 3600.0


class DiskStore:
    """A folder of samples, shared by the processes of a machine.

    A file is written under another name and then renamed, so a killed writer leaves nothing that is read; a checksum at
    the start detects files damaged by a power failure. A full disk stops caching, not the training.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._partial = self.directory / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)
        for path in self._partial.iterdir():
            with suppress(FileNotFoundError):  # its writer is alive and has renamed it
                if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                    path.unlink()

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name

    def get(self, key: bytes) -> bytes | None:
        """Return the sample, or None; a damaged file counts as none."""
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        value = data[_CRC.size :]
        if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != zlib.crc32(value):
            return None
        return value

    def put(self, key: bytes, value: bytes) -> bool:
        """Store a sample, replacing a damaged one if there is one; return False if the disk is full."""
        final = self.path(key)
        name = None
        try:
            final.parent.mkdir(exist_ok=True)
            file, name = tempfile.mkstemp(dir=self._partial)
            with os.fdopen(file, "wb") as stream:
                stream.write(_CRC.pack(zlib.crc32(value)))
                stream.write(value)
            os.replace(name, final)
        except OSError as error:
            if name is not None:
                Path(name).unlink(missing_ok=True)
            if error.errno not in _NO_SPACE:
                raise
            return False
        return True


class Levels:
    """The levels below a data set. When it is sent to another process, it opens the arena again there."""

    def __init__(
        self,
        prefix: Callable[[Any], Any],
        memory_bytes: int | str,
        directory: str | Path,
        name: str,
        *,
        capacity: int,
        check: str,
        disk: str | Path | None = None,
    ) -> None:
        check_choice("check", check, ("first", "always"))
        self.prefix, self.check, self.path = prefix, check, Path(directory) / f"{name}.arena"
        held = self.path.stat().st_blocks * 512 if self.path.exists() else 0
        self.limit = budget(memory_bytes, self.path.parent, held)
        self.slots = max(16, 3 * capacity // 2)
        if self.limit <= table_bytes(self.slots):
            raise ValueError(
                f"memory_bytes={self.limit} leaves no room for samples: the table for {capacity} of them alone takes "
                f"{table_bytes(self.slots)} bytes"
            )
        self.disk = None if disk is None else DiskStore(disk)
        self._arena: Arena | None = Arena.open(self.path, self.slots, self.limit)
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arena": None}

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            if self._closed:
                raise ValueError("this cache is closed: make a new CachedDataset")
            self._arena = Arena.open(self.path, self.slots, self.limit)
        return self._arena

    def value(self, key: bytes, raw_key: bytes, read: Callable[[], Any], *, store: bool = True) -> Any:
        """Return a sample's prefix value, by its key and that of the raw sample; ``store``: whether to keep it here."""
        arena = self.arena
        if store:
            packed = arena.get(key, always=self.check == "always")
            if packed is not None:
                arena.counters.add(hits_memory=1, bytes_memory=len(packed))
                return unpack(packed)
        raw = self._raw(raw_key, read, self.disk if store else None)
        begin = time.perf_counter_ns()
        value = self.prefix(raw)
        spent = time.perf_counter_ns() - begin
        packed = pack(value)
        admitted = arena.put(key, packed) if store else None
        arena.counters.add(decode_nanoseconds=spent, admitted=admitted is True, refused=admitted is False)
        return unpack(packed)  # same as for a hit: new memory, the same strides

    def _raw(self, raw_key: bytes, read: Callable[[], Any], disk: DiskStore | None) -> Any:
        kept = disk.get(raw_key) if disk is not None else None
        if kept is not None:
            self.arena.counters.add(hits_disk=1, bytes_disk=len(kept))
            return unpack(kept)
        raw = read()
        if disk is not None:
            disk.put(raw_key, pack(raw))
        self.arena.counters.add(reads_source=1, bytes_source=size_of(raw))
        return raw

    def close(self, *, delete: bool = False) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._closed = True
        if delete:
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".lock").unlink(missing_ok=True)
