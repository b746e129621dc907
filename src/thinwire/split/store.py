"""Checkpoints of one end: a directory per step, whole or not there, read without unpickling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.durable import CheckpointDirectory, read_file, write_file
from thinwire.split.errors import SessionError

_CONTENT = "state.pt"


def save(directory: Path, step: int, content: dict[str, Any], keep: int = 2) -> None:
    """Write ``step-<n>``, whole or not at all; older ones beyond ``keep`` go.

    Two are kept, since the other end may have written one less before it died.
    """
    with _kept(directory, keep).write(step) as partial:
        write_file(partial / _CONTENT, content)


def steps(directory: Path | None) -> list[int]:
    """The steps of the whole checkpoints in a directory, ascending."""
    return [] if directory is None else list(_kept(directory).found())


def load(directory: Path, step: int) -> dict[str, Any]:
    """The content of a checkpoint.

    Raises:
        SessionError: it is not there, or damaged; the message names the file.
    """
    kept = _kept(directory)
    try:
        return read_file(kept.found().get(step, kept.path(step)) / _CONTENT)
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
    if directory is not None:
        _kept(directory).drop_after(step)


def _kept(directory: Path, keep: int = 0) -> CheckpointDirectory:
    return CheckpointDirectory(directory, "step", keep, holds=_CONTENT)
