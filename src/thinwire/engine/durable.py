"""Files and directories that are whole or not there, whatever dies in the middle: flushed first, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch


def write_file(path: Path, content: Any) -> None:
    """Store tensors and plain values, flushed to disk."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path) -> dict[str, Any]:
    """Read them back, on the CPU, without unpickling anything else."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def write_whole(path: Path, content: Any) -> None:
    """As ``write_file``, under another name until it is whole; what was there before is replaced."""
    partial = path.with_name(f".partial-{path.name}")
    write_file(partial, content)
    partial.replace(path)
    flush(path.parent)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a finished directory its name. One that has the name already goes only when the new one is there."""
    flush(partial)
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)
    flush(final.parent)


def flush(path: Path) -> None:
    """Make a file's content, or what was made, renamed or removed in a directory, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
