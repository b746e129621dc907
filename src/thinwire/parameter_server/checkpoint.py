"""The server's checkpoint: weights, optimizer, version, data positions, counters. One file, whole or absent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.engine.durable import read_file, write_whole

_NAME = re.compile(r"version-(\d+)\.pt")


@dataclass(frozen=True)
class Saved:
    """What a server needs to go on.

    Attributes:
        theta: weights, ``[D]``.
        optimizer: its ``state_dict``.
        version: updates applied.
        next_member: above every member number that was given out.
        positions: node -> next step of its workers' data.
        counters: the server's.
        layout: JSON of the model's layout.
        buffers: moving averages of its buffers, ``[B]``, if there are any.
    """

    theta: Tensor
    optimizer: dict[str, Any]
    version: int
    next_member: int
    positions: dict[int, int]
    counters: dict[str, int] = field(default_factory=dict)
    layout: str = ""
    buffers: Tensor | None = None


def save(directory: str | Path, saved: Saved, keep: int = 2) -> Path:
    """Write a checkpoint under another name, flush it, and rename it; older ones than the last ``keep`` are removed."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"version-{saved.version:09d}.pt"
    write_whole(final, vars(saved))
    for path in found(root)[:-keep]:
        path.unlink()
    return final


def load(directory: str | Path) -> Saved | None:
    """The newest checkpoint; None if there is none.

    Raises:
        ValueError: the file is not a server's checkpoint.
    """
    paths = found(directory)
    if not paths:
        return None
    try:
        return Saved(**read_file(paths[-1]))
    except Exception as error:  # torch's reader raises whatever it stumbles over
        raise ValueError(f"{paths[-1]} is no checkpoint of a parameter server ({error}): remove it") from error


def found(directory: str | Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    root = Path(directory)
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name)) if root.is_dir() else []
