"""Checkpoints of one end: one directory per step, complete or absent, read without unpickling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.core.durable import CheckpointDirectory, read_file, write_file
from thinwire.systems.split.errors import SessionError

_CONTENT = "state.pt"


def save(directory: Path, step: int, content: dict[str, Any], keep: int = 2) -> None:
    """Write a complete ``step-<n>`` or none; remove older ones beyond ``keep``.

    Two are kept, because the other end may have died before writing its newest.
    """
    with _kept(directory, keep).write(step) as partial:
        write_file(partial / _CONTENT, content)


def steps(directory: Path | None) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, ascending."""
    return [] if directory is None else list(_kept(directory).found())


def load(directory: Path, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint.

    Raises:
        SessionError: it is missing or damaged; the message names the file.
    """
    kept = _kept(directory)
    try:
        return read_file(kept.found().get(step, kept.path(step)) / _CONTENT)
    except (OSError, ValueError) as error:
        raise SessionError(f"the checkpoint cannot be read: {error}") from error


def check_pair(content: dict[str, Any], pair: str, directory: Path) -> None:
    """Raise `SessionError` unless a checkpoint belongs to these halves."""
    if content.get("pair") != pair:
        raise SessionError(
            f"{directory} holds checkpoints of other halves: give this training another directory, or remove that one"
        )


def drop_after(directory: Path | None, step: int) -> None:
    """Remove checkpoints of later steps, because training continues from this step and will differ from theirs."""
    if directory is not None:
        _kept(directory).drop_after(step)


def _kept(directory: Path, keep: int = 0) -> CheckpointDirectory:
    return CheckpointDirectory(directory, "step", keep, holds=_CONTENT)
