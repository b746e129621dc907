"""Let only one job at a time write checkpoints in a directory; a second job is refused, and told which job is first.

Rank 0 holds a POSIX lock on the directory's ``.lock``, and has written there which job it is. The kernel releases the
lock when the process ends in any way; an NFS server does so when the machine is gone (NFSv4: after its lease, 90 s by
default). So a dead job does not keep out a job that is started again, here or elsewhere. If the file system has no
locks, the job that came last gets the directory, and the one before is refused at its next checkpoint.

POSIX locks belong to a process and are not inherited by ``fork``: a DataLoader's workers do not keep a dead job's lock.
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
_MOST = 4096  # largest note, in bytes


class Claim:
    """This process's claim on a directory, for all GradientSyncs that save there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users: set[int] = set()
        self._path = folder / ".lock"
        self._file = -1
        self._note: bytes | None = None

    def renew(self) -> None:
        """Take the lock, or check that no other job has it by now.

        Raises:
            OSError: another job has it, or the file cannot be written.
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
            who = "it left no name"
        return (
            f"another job writes checkpoints in {self.folder} ({who}): give this one its own directory, or end the "
            f"other one; if it is dead, remove {self._path}"
        )

    def close(self) -> None:
        """Release the lock, as the end of the process does."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_held: dict[tuple[int, str], Claim] = {}  # by process ID, because a fork holds no locks, and by real path


class Hold:
    """One user's share of its process's claim; ``remove`` gives it back, and so does the end of the user."""

    def __init__(self, user: Any, key: tuple[int, str]) -> None:
        _held[key].users.add(id(user))
        self._end = weakref.finalize(user, _leave, key, id(user))
        self._end.atexit = False

    def remove(self) -> None:
        """Give it back. Idempotent."""
        self._end()


def hold(user: Any, folder: Path) -> Hold | None:
    """Claim an existing folder for this process, so that no other writes there as long as the user lives.

    Returns:
        A handle with which to give it back; None if the user has one already.

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
