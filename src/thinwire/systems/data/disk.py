"""Raw samples as files on local disk, each under its content key."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path

_CRC = struct.Struct("<I")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORGOTTEN_SECONDS = 3600.0


class DiskStore:
    """A folder of samples, shared by the processes of a machine.

    A file is written under another name and then renamed, so a killed writer leaves nothing that is read; a checksum at
    the start detects files damaged by a power failure. A full disk stops caching, not the training.

    Args:
        directory: created if needed; files left there by killed writers at least an hour ago are removed.
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
        """Return the path of a key's sample, whether it exists or not."""
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
