"""A secret for the processes of one run, in a file that only this user can read and that they find by a variable."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "THINWIRE_SECRET_FILE"
_PREFIX = "thinwire-secret-"
_HOUR_SECONDS = 3600.0


@contextmanager
def fresh_secret_file() -> Iterator[str]:
    """Create a file with a secret that only this user can read; remove it, and hour-old ones of killed runs."""
    import fcntl  # not on Windows, which has no lab

    folder = _own_folder()
    for left in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError), open(left, "rb", opener=_opener) as file:  # is gone, or is in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - left.stat().st_mtime > _HOUR_SECONDS:
                left.unlink()
    with tempfile.NamedTemporaryFile("w", prefix=_PREFIX, dir=folder, encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(secrets.token_hex())
        file.flush()
        yield file.name


def _own_folder() -> Path:
    """Return a folder for this user alone: in the temporary folder itself, anybody may leave links and pipes."""
    folder = Path(tempfile.gettempdir()) / f"thinwire-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="thinwire-"))  # somebody else took the name


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
