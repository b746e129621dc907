"""One job at a time writes checkpoints in a directory: a second one is refused, and told who the first is.

Rank 0 holds a POSIX lock on the directory's ``.lock`` and has written there who it is. The kernel gives the lock back
when the process ends, however it ends, and a server of NFS when the machine is gone (NFSv4: after its lease, 90 s by
default). So a job that is started again, here or elsewhere, is not kept out by a dead one. Where the file system has no
locks, the job that came last has the directory, and the one before is refused at its next checkpoint.

POSIX locks belong to a process and are not inherited by ``fork``: workers of a DataLoader do not keep a dead job's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
import weakref
from pathlib import Path
from typing import Any

_BUSY = (errno.EACCES, errno.EAGAIN)
_MOST = 4096  # bytes of a note


class Claim:
    """This process's hold on a directory, for all GradientSyncs that save there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users: set[int] = set()
        self._path = folder / ".lock"
        self._file = -1
        self._note: bytes | None = None

    def renew(self) -> None:
        """Take the lock, or see that nobody else has it by now.

        Raises:
            OSError: another job has it; or it cannot be written.
        """
        if self._file >= 0 and not self._same():
            self.close()
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise OSError(self._taken()) from error
        found = os.pread(self._file, _MOST, 0)
        if found and found == self._note:
            return
        if found and self._note is not None:
            raise OSError(self._taken())
        who = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        note = json.dumps({**who, "number": os.urandom(8).hex()}).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, note, 0)
        self._note = note

    def _same(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _taken(self) -> str:
        try:
            note = json.loads(os.pread(self._file, _MOST, 0))
            who = f"process {int(note['pid'])} on {note['host']!r}, since {note['since']!r}"
        except (OSError, ValueError, TypeError, KeyError):
            who = "it has left no name"
        return (
            f"another job writes checkpoints in {self.folder} ({who}): give this one a directory of its own, or end "
            f"the other one; if it is dead, remove {self._path}"
        )

    def close(self) -> None:
        """Give the lock back, as the end of the process does."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_held: dict[tuple[int, str], Claim] = {}  # by process, since a fork has none, and real path


class Hold:
    """A user's part in its process's claim: given back by ``remove``, or with the user."""

    def __init__(self, user: Any, key: tuple[int, str]) -> None:
        _held[key].users.add(id(user))
        self._end = weakref.finalize(user, _leave, key, id(user))
        self._end.atexit = False

    def remove(self) -> None:
        """Give it back. Idempotent."""
        self._end()


def hold(user: Any, folder: Path) -> Hold | None:
    """Make sure that this process alone writes in a folder, which is there, as long as the user lives.

    Returns:
        A handle to give it back with; None if the user has one already.

    Raises:
        OSError: another job writes there.
    """
    key = os.getpid(), os.path.realpath(folder)
    claim = _held.get(key) or Claim(folder)
    try:
        claim.renew()
    except BaseException:
        if key not in _held:
            claim.close()
        raise
    _held[key] = claim
    return None if id(user) in claim.users else Hold(user, key)


def _leave(key: tuple[int, str], user: int) -> None:
    claim = _held.get(key)
    if claim is not None:
        claim.users.discard(user)
        if not claim.users:
            _held.pop(key).close()
