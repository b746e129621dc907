"""Files and directories that are complete or absent, even after a crash: flushed first, then renamed."""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import logging
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.core.checks import local_path

_PARTIAL, _GONE, _OLD = ".partial-", "removed-", ".old-"
_DIGEST_BYTES = 16
_PIECE = 1 << 20
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
log = logging.getLogger("thinwire")
_warn_once = cache(log.warning)


class _Watched:
    """A file for torch's writer, which hides the ``OSError`` of a full disk: this keeps the error, and a digest."""

    file: IO[bytes]

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def readable(content: Any, key: str = "") -> Any:
    """Return what ``read_file`` can read back: the content, with NumPy's numbers as Python's.

    What ``torch.load(weights_only=True)`` would refuse raises ``ValueError``, which names its place below ``key``.
    """
    if isinstance(content, (np.generic, np.ndarray)) and content.ndim == 0:
        content = content.item()
    kind = type(content)
    if kind in _PLAIN or (kind in (Tensor, nn.Parameter) and not vars(content)):
        return content
    if kind in (list, tuple):
        return kind(readable(value, f"{key}[{place}]") for place, value in enumerate(content))
    if kind in (dict, OrderedDict):
        made = copy.copy(content)  # has an OrderedDict's attributes
        made.clear()
        for k, value in content.items():
            place = f"{key}[{k!r}]" if key else str(k)
            made[readable(k, f"the key {place}")] = readable(value, place)
        return made
    return _read_back(content, key)


def _read_back(content: Any, key: str) -> Any:
    file = io.BytesIO()
    try:
        torch.save(content, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # any object can raise anything
        kind = f"{type(content).__module__}.{type(content).__qualname__}"
        raise ValueError(
            f"{key} is a {kind}, which torch.load(weights_only=True) would refuse: keep a number, a text or a tensor "
            f"there, or call torch.serialization.add_safe_globals([{type(content).__qualname__}]) before saving and "
            "before loading"
        ) from error
    return content


def write_file(path: Path, content: Any, *, synced: bool = True) -> str:
    """Write bytes and text as they are; write tensors and plain values for ``read_file``. ``synced``: flush it to disk.

    Returns the file's ``digest_of``; "" for bytes and text. An ``OSError`` has the path. What ``read_file`` would
    refuse raises ``ValueError`` before anything is written.
    """
    watched = _Watched()
    raw = content.encode() if isinstance(content, str) else readable(content)
    try:
        with path.open("wb") as file:
            if isinstance(raw, bytes):
                file.write(raw)
            else:
                watched.file = file
                torch.save(raw, cast("IO[bytes]", watched))
            file.flush()
            if synced:
                os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else watched.error
        if cause is None or cause.errno is None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from error
    return "" if isinstance(raw, bytes) else watched.digest.hexdigest()


def digest_of(path: Path) -> str:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def read_file(path: Path) -> dict[str, Any]:
    """Read a file of ``write_file``, onto the CPU, without unpickling anything else."""
    with path.open("rb") as file:
        try:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch's reader can raise anything
            if refused := re.search(r"GLOBAL (\S+) was not an allowed", str(error)):
                raise ValueError(
                    f"{path} holds a {refused[1]}, which torch.load(weights_only=True) refuses: if you trust the file, "
                    "name that class in torch.serialization.add_safe_globals and load again"
                ) from error
            reason = type(error).__name__ if path.stat().st_size else "it is empty"
            raise ValueError(f"{path} is damaged, or was not written by thinwire ({reason})") from error
    return content


def write_whole(path: Path, content: Any, *, synced: bool = True, shared: bool = False) -> None:
    """Do as ``write_file``, under another name until it is complete; an existing file is replaced.

    ``shared``: other processes may write this file at the same time; each uses a name of its own.
    """
    partial = path.with_name(f"{_PARTIAL}{f'{os.getpid()}-' if shared else ''}{path.name}")
    try:
        write_file(partial, content, synced=synced)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    if synced:
        flush(path.parent)


class CheckpointDirectory:
    """Numbered checkpoints ``<name>-<number>`` in a directory, each complete or absent. For one writer at a time.

    Each is a directory, or a file if there is a ``suffix``. It is written under another name, flushed and renamed. An
    existing directory of that name is removed only when the new one is there: between the two renames it has another
    name, under which ``found`` finds it. The newest ``keep`` stay (0: all); later numbers than the one that is finished
    are left alone. A directory without the file ``holds`` is not one of these checkpoints.
    """

    def __init__(self, folder: str | Path, name: str, keep: int = 0, *, suffix: str = "", holds: str = "") -> None:
        self.folder, self._name, self._keep, self._suffix, self._holds = local_path(folder), name, keep, suffix, holds
        self._pattern = re.compile(rf"{re.escape(name)}-(\d+){re.escape(suffix)}")

    def path(self, number: int) -> Path:
        return self.folder / f"{self._name}-{number:09d}{self._suffix}"

    def partial(self, number: int) -> Path:
        return self.folder / f"{_PARTIAL}{self.path(number).name}"

    def found(self) -> dict[int, Path]:
        """Return the complete checkpoints by number, ascending; after a kill between renames, the replaced one."""
        paths = {path.name: path for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        numbers = {}
        for name, path in paths.items():
            match = self._pattern.fullmatch(name.removeprefix(_OLD))
            if match and (match[0] == name or match[0] not in paths) and (path / self._holds).exists():
                numbers[int(match[1])] = path
        return dict(sorted(numbers.items()))

    def begin(self, number: int) -> Path:
        """Remove what killed writers left. Return where to write: an empty directory, or the name of a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        partial = self.partial(number)
        if not self._suffix:
            partial.mkdir()
        return partial

    def finish(self, number: int, stays: int | None = None) -> Path:
        """Rename what was written to its final name; remove those not to be kept (``stays``: keep this one instead)."""
        partial, final = self.partial(number), self.path(number)
        old = final.with_name(f"{_OLD}{final.name}")
        flush(partial)
        if not self._suffix and final.exists():
            self._remove(old)
            final.rename(old)
        partial.rename(final)
        flush(self.folder)
        try:
            self._remove(old)
            found = {known: path for known, path in self.found().items() if known <= number}
            kept = list(found)[-self._keep :] if stays is None else [stays, number]
            for known in found.keys() - kept:
                self._remove(found[known])
        except OSError as error:  # the new checkpoint is there, which is what counts
            log.warning("thinwire: an old checkpoint was not removed: %s", error)
        return final

    def abort(self, number: int) -> None:
        self._discard(self.partial(number))

    @contextmanager
    def write(self, number: int, stays: int | None = None) -> Iterator[Path]:
        try:
            yield self.begin(number)
            self.finish(number, stays)
        except BaseException:
            self.abort(number)
            raise

    def drop_after(self, number: int) -> None:
        self._sweep()  # else a replaced checkpoint would reappear when its successor is removed
        for later, path in self.found().items():
            if later > number:
                self._remove(path)

    def _sweep(self) -> None:
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            name = path.name.removeprefix(_PARTIAL).removeprefix(_GONE).removeprefix(_OLD)
            if name == path.name or not self._pattern.fullmatch(name):
                continue
            if path.name.startswith(_PARTIAL):
                self._discard(path)
            elif path.with_name(name).exists():
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, if it exists. What is left after a kill has a name that is never read."""
        if self._suffix:
            path.unlink(missing_ok=True)
        elif path.exists():
            gone = path.with_name(f"{_PARTIAL}{_GONE}{path.name.removeprefix(_OLD)}")
            self._discard(gone)
            path.rename(gone)
            shutil.rmtree(gone)

    def _discard(self, path: Path) -> None:
        if self._suffix:
            with suppress(OSError):
                path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def user_cache() -> Path:
    """Return thinwire's folder under XDG_CACHE_HOME, or ~/.cache; ``ValueError`` for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"
    except RuntimeError as error:
        raise ValueError(
            "results are kept in the user's home directory, and this user has none: set XDG_CACHE_HOME to a directory"
        ) from error


def flush(path: Path) -> None:
    """Flush a file's content, or changes to a directory's entries, to disk, so that they survive a loss of power.

    Some file systems do not flush directories at all. That is said once: what counts is that files were flushed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _REFUSALS or not path.is_dir():
            raise
        _warn_once("thinwire: this file system flushes no directories (%s), only files", error.strerror)
    finally:
        os.close(handle)
