"""Checkpoints of one end: a directory per step, whole or not there, read without unpickling."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from thinwire.engine.durable import put_in_place, read_file, write_file
from thinwire.split.errors import SessionError

_NAME = re.compile(r"step-(\d+)")


def save(directory: Path, step: int, content: dict[str, Any], keep: int = 2) -> None:
    """Write ``step-<n>`` under another name, flush it, rename it; older ones beyond ``keep`` go.

    Two are kept, since the other end may have written one less before it died.
    """
    final, partial = directory / f"step-{step:09d}", directory / f".partial-{step:09d}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_file(partial / "state.pt", content)
    put_in_place(partial, final)
    for other in steps(directory)[:-keep]:
        shutil.rmtree(directory / f"step-{other:09d}")


def steps(directory: Path | None) -> list[int]:
    """The steps of the whole checkpoints in a directory, ascending."""
    if directory is None or not directory.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir() if (path / "state.pt").exists())
    return sorted(int(match[1]) for match in found if match)


def load(directory: Path, step: int) -> dict[str, Any]:
    """The content of a checkpoint."""
    return read_file(directory / f"step-{step:09d}" / "state.pt")


def check_pair(content: dict[str, Any], pair: str, directory: Path) -> None:
    """Raise `SessionError` unless a checkpoint is of these halves."""
    if content.get("pair") != pair:
        raise SessionError(
            f"{directory} holds checkpoints of other halves: give this training another directory, or remove that one"
        )


def drop_after(directory: Path | None, step: int) -> None:
    """Remove checkpoints of later steps: training goes on from this one, and theirs is another future."""
    for other in steps(directory):
        if directory is not None and other > step:
            shutil.rmtree(directory / f"step-{other:09d}")
