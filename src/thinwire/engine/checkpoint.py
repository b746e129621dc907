"""Checkpoints that survive a kill and another number of ranks.

A checkpoint is a directory ``step-<n>``: ``model.pt`` (model, optimizer, step; from rank 0, equal on all) and
``rank-<r>.pt`` for every rank's residuals. It is written under another name, flushed to disk, and renamed when all
ranks have finished, so what is called ``step-<n>`` is always whole. Files are read with ``weights_only=True``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.engine.durable import put_in_place, read_file, write_file
from thinwire.engine.sync import GradientSync

_NAME = re.compile(r"step-(\d+)")


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: GradientSync,
    step: int,
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint. All ranks must call it, on a file system that they share.

    Args:
        directory: holds the checkpoints; made if needed.
        step: the user's step; part of the name.
        keep: how many to keep; older ones are removed. 0: all.

    Returns:
        The checkpoint's directory.
    """
    root = Path(directory)
    final, partial = root / f"step-{step:09d}", root / f".partial-{step:09d}"
    problem = ""
    try:
        if sync.rank == 0:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        sync.agree(False)  # nobody writes before the directory is there
        write_file(partial / f"rank-{sync.rank:05d}.pt", sync.state_dict())
        if sync.rank == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            write_file(partial / "model.pt", content)
    except OSError as error:
        problem = str(error)
    if sync.agree(bool(problem)):
        raise OSError(f"no checkpoint was written at {final}: {problem or 'another rank could not write'}")
    if sync.rank == 0:
        put_in_place(partial, final)
        for path in complete(root)[:-keep] if keep else []:
            shutil.rmtree(path)
    sync.agree(False)
    return final


def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: GradientSync,
    step: int | None = None,
) -> int | None:
    """Take over the newest whole checkpoint, or that of ``step``. All ranks must call it.

    With the number of ranks it was saved from, training goes on bit for bit; with another, every rank gets the mean of
    the old residuals, which keeps the update still owed to the model.

    Returns:
        The step it was saved at; None if there is none.

    Raises:
        FileNotFoundError: ``step`` was asked for and is not there.
        ValueError: it does not fit this model or method.
    """
    found = complete(directory)
    if step is not None:
        found = [path for path in found if path.name == f"step-{step:09d}"]
        if not found:
            raise FileNotFoundError(f"{directory} holds no whole checkpoint of step {step}")
    if not found:
        return None
    path = found[-1]
    content: dict[str, Any] = read_file(path / "model.pt")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    files = sorted(path.glob("rank-*.pt"))
    state: Mapping[str, Any]
    if len(files) == sync.topology.world_size:
        state = read_file(files[sync.rank])
    else:
        merged: dict[str, Any] = {}
        for file in files:
            merged.update(read_file(file))
        state = merged
    sync.load_state_dict(state)
    return int(content["step"])


def complete(directory: str | Path) -> list[Path]:
    """The whole checkpoints in a directory, oldest first."""
    root = Path(directory)
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name) and (path / "model.pt").exists())
