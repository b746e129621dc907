"""Checkpoints of one end: a directory per step, whole or not there, read without unpickling."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from thinwire.engine.durable import finished, put_in_place, read_file, remove, write_file
from thinwire.split.errors import SessionError

_NAME = re.compile(r"step-(\d+)")


def save(directory: Path, step: int, content: dict[str, Any], keep: int = 2) -> None:
    """Write ``step-<n>`` under another name, flush it, rename it; older ones beyond ``keep`` go.

    Two are kept, since the other end may have written one less before it died.
    """
    final, partial = directory / f"step-{step:09d}", directory / f".partial-{step:09d}"
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        write_file(partial / "state.pt", content)
        put_in_place(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for path in _whole(directory)[:-keep]:
        remove(path)


def steps(directory: Path | None) -> list[int]:
    """The steps of the whole checkpoints in a directory, ascending."""
    return [] if directory is None else [_step(path) for path in _whole(directory)]


def load(directory: Path, step: int) -> dict[str, Any]:
    """The content of a checkpoint.

    Raises:
        SessionError: it is not there, or damaged; the message names the file.
    """
    path = next((path for path in _whole(directory) if _step(path) == step), directory / f"step-{step:09d}")
    try:
        return read_file(path / "state.pt")
    except (OSError, ValueError) as error:
        raise SessionError(f"no checkpoint can be taken over: {error}") from error


def check_pair(content: dict[str, Any], pair: str, directory: Path) -> None:
    """Raise `SessionError` unless a checkpoint is of these halves."""
    if content.get("pair") != pair:
        raise SessionError(
            f"{directory} holds checkpoints of other halves: give this training another directory, or remove that one"
        )


def drop_after(directory: Path | None, step: int) -> None:
    """Remove checkpoints of later steps: training goes on from this one, and theirs is another future."""
    for path in [] if directory is None else _whole(directory):
        if _step(path) > step:
            remove(path)


def _whole(directory: Path) -> list[Path]:
    return [path for path in finished(directory, _NAME) if (path / "state.pt").exists()]


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
