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

    A file is written under another name and renamed, so a killed writer leaves nothing that is read; a checksum in
    front finds what a power failure tore. A full disk ends admission, not the training.

    Args:
        directory: made if needed; what killed writers left there an hour ago or earlier is removed.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._partial = self.directory / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)
        for path in self._partial.iterdir():
            with suppress(FileNotFoundError):  # its writer is alive, and has renamed it
                if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
                    path.unlink()

    def path(self, key: bytes) -> Path:
        """Where the sample of a key lies, or would."""
        name = key.hex()
        return self.directory / name[:2] / name

    def get(self, key: bytes) -> bytes | None:
        """The sample, or None; a torn file counts as none."""
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        value = data[_CRC.size :]
        if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != zlib.crc32(value):
            return None
        return value

    def put(self, key: bytes, value: bytes) -> bool:
        """Store a sample, in place of a torn one if there is one; False: the disk is full."""
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
