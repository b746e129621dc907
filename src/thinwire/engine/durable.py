"""Files and directories that are whole or not there, whatever dies in the middle: flushed first, then renamed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

_PARTIAL, _OLD = ".partial-", ".old-"
_DIGEST_BYTES = 16
_PIECE = 1 << 20


class _Watched:
    """A file as torch's writer sees it, which hides the ``OSError`` of a full disk behind words of its own."""

    file: IO[bytes]

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Called by torch."""
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Called by torch at the end."""
        self.file.flush()


def write_file(path: Path, content: Any) -> str:
    """Store tensors and plain values, flushed to disk.

    Returns:
        The digest of the file, as ``digest_of`` finds it.

    Raises:
        OSError: it could not be written, with its path.
    """
    watched = _Watched()
    try:
        with path.open("wb") as file:
            watched.file = file
            torch.save(content, cast("IO[bytes]", watched))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else watched.error
        if cause is None or cause.errno is None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from error
    return watched.digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Store text, flushed to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def digest_of(path: Path) -> str:
    """A checksum of a file's content."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def read_file(path: Path) -> dict[str, Any]:
    """Read them back, on the CPU, without unpickling anything else.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or something else.
    """
    with path.open("rb") as file:
        try:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch's reader raises whatever it stumbles over
            reason = type(error).__name__ if path.stat().st_size else "it is empty"
            raise ValueError(f"{path} is damaged, or was not written by thinwire ({reason})") from error
    return content


def write_whole(path: Path, content: Any) -> None:
    """As ``write_file``, under another name until it is whole; what was there before is replaced."""
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    try:
        write_file(partial, content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a finished directory its name. One that has the name already goes only when the new one is there.

    Between the two renames of that case the old one has another name, under which ``finished`` finds it.
    """
    flush(partial)
    old = final.with_name(f"{_OLD}{final.name}")
    if final.exists():
        remove(old)
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    with suppress(OSError):  # the new one is there
        remove(old)


def finished(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Directories that ``put_in_place`` has finished, by the number in their name: the first group of the pattern.

    Where a kill fell between the renames, the one that was to be replaced stands for it.
    """
    paths = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    numbers: dict[Path, int] = {}
    for name, path in paths.items():
        match = pattern.fullmatch(name.removeprefix(_OLD))
        if match and (match[0] == name or match[0] not in paths):
            numbers[path] = int(match[1])
    return sorted(numbers, key=numbers.__getitem__)


def remove(path: Path) -> None:
    """Remove a directory, if it is there: what a kill leaves of it has no name that is read."""
    if path.exists():
        gone = path.with_name(f"{_PARTIAL}removed-{path.name.removeprefix('.')}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove what killed writers, and failed ones, left there. Only for who alone writes there."""
    for path in list(folder.iterdir()):
        if path.name.startswith(_PARTIAL) and path.is_dir():
            shutil.rmtree(path)
        elif path.name.startswith(_OLD) and path.with_name(path.name.removeprefix(_OLD)).exists():
            remove(path)


def flush(path: Path) -> None:
    """Make a file's content, or what was made, renamed or removed in a directory, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
