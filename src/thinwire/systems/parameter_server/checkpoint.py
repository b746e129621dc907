"""The server's checkpoint: weights, optimizer, version, data positions, counters. One file, complete or absent.

If the model is in shards, each first saves its slice and its optimizer, then the server everything else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_count, local_path
from thinwire.core.durable import CheckpointDirectory, read_file, write_file
from thinwire.systems.parameter_server.layout import Layout, slices

logger = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Saved:
    """What a server or shard needs to continue. ``theta``: a shard's slice; empty for a server with shards.

    ``next_member``: above all member numbers given out. ``positions``: node -> next step of its workers' data.
    ``layout``: JSON. ``shards``: 0 if the weights are whole; ``index``: -1 for the server; ``run``: of the training.
    """

    theta: Tensor
    optimizer: dict[str, Any]
    version: int
    next_member: int
    positions: dict[int, int]
    counters: dict[str, int] = field(default_factory=dict)
    layout: str = ""
    buffers: Tensor | None = None
    shards: int = 0
    index: int = -1
    run: int = 0


def prepare(directory: str | Path) -> None:
    try:
        local_path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory} cannot hold checkpoints ({error.strerror}): give a directory") from error


def save(directory: str | Path, saved: Saved, whole: int | None = None) -> None:
    """Write a complete checkpoint or none; if that fails, existing ones are unchanged. One older checkpoint is kept.

    ``whole``: its version, because other processes' checkpoints belong to it; None: the newest.
    """
    kept = kept_in(directory, saved.index)
    try:
        with kept.write(saved.version, whole) as partial:
            write_file(partial, vars(saved))
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"  # the error's own text also names the partial file
        raise OSError(f"the checkpoint {kept.path(saved.version)} could not be written ({why})") from error


def load(directory: str | Path) -> Saved | None:
    paths = list(kept_in(directory).found().values())
    return _read(paths[-1]) if paths else None


def load_slice(directory: str | Path, version: int, index: int, shards: int, run: int) -> Saved:
    """Return a shard's checkpoint of exactly this version; remove newer ones, which the server did not complete."""
    kept = kept_in(directory, index)
    paths = kept.found()
    advice = f"give shard {index} the directory that it had"
    if version not in paths:
        there = ", ".join(map(str, paths)) or "none"
        raise ValueError(
            f"{directory} has no checkpoint of shard {index} at version {version}, from which the server continues "
            f"(found: {there}): {advice}"
        )
    saved = _read(paths[version])
    if (saved.index, saved.shards, saved.run) != (index, shards, run):
        raise ValueError(f"{paths[version]} is from another training, or has another number of shards: {advice}")
    kept.drop_after(version)
    return saved


def _read(path: Path) -> Saved:
    content = read_file(path)
    try:
        saved = Saved(**content)
        _check(saved)
        return saved
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of a parameter server ({error}): give another directory, or move that file"
        ) from error


def _check(saved: Saved) -> None:
    for name in ("version", "next_member", "shards", "index", "run"):
        check_count(name, getattr(saved, name), -1 if name == "index" else 0)
    for name in ("positions", "counters"):
        found = getattr(saved, name)
        if not isinstance(found, dict) or not all(isinstance(value, int) for value in found.values()):
            raise ValueError(f"{name}={found!r} must be a dictionary of whole numbers")
    groups = saved.optimizer.get("param_groups") if isinstance(saved.optimizer, dict) else None
    of_server = saved.shards > 0 and saved.index < 0  # then the shards have the weights and the optimizer
    if not of_server and not (isinstance(groups, list) and isinstance(saved.optimizer.get("state"), dict)):
        raise ValueError("its optimizer has no state_dict")
    layout = Layout.from_json(saved.layout)
    piece = slices(layout.numel, saved.shards)[saved.index] if saved.index >= 0 else slice(0, layout.numel)
    _check_flat("theta", saved.theta, 0 if of_server else piece.stop - piece.start, layout.dtype)
    if saved.buffers is not None:
        _check_flat("buffers", saved.buffers, layout.buffers.numel, torch.float64)


def _check_flat(name: str, x: object, numel: int, dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is not a tensor")
    if x.shape != (numel,) or (numel and x.dtype != dtype):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)} but its layout has {dtype} [{numel}]")


def kept_in(directory: str | Path, index: int = -1) -> CheckpointDirectory:
    """Return the checkpoint directory of the server, or of shard ``index``."""
    return CheckpointDirectory(directory, "version" if index < 0 else f"shard-{index}-version", 2, suffix=".pt")


class Saves:
    """Checkpoints of a server, if it has a directory. ``unsaved``: why the final weights are in none."""

    def __init__(self, directory: str | Path | None, every: int) -> None:
        check_count("checkpoint_every", every)
        if directory is not None:
            prepare(directory)
        self.directory, self._every = directory, every
        self.resumed, self.fresh = 0, True
        self.unsaved: str | None = None

    def load(self, layout: Layout, shards: int) -> Saved | None:
        saved = load(self.directory) if self.directory is not None else None
        if saved is None:
            return None
        if saved.layout != layout.to_json():
            layout.check(Layout.from_json(saved.layout))
        if saved.shards != shards:
            raise ValueError(
                f"the checkpoint in {self.directory} holds a model in {saved.shards} shards, not {shards}: start the "
                f"server with the same number (shards=, or --shards)"
            )
        self.resumed, self.fresh = saved.version, False
        return saved

    def due(self, version: int) -> bool:
        return self.directory is not None and version % self._every == 0

    def failed(self, why: str) -> None:
        logger.warning("%s; %s", why, self._next_start())

    def check_last(self, version: int) -> None:
        """Set ``unsaved``, and warn, if the final weights, those of ``version``, were not saved."""
        assert self.directory is not None
        if max(kept_in(self.directory).found(), default=-1) < version:
            missing = f"the weights of version {version} are in no checkpoint in {self.directory}"
            self.unsaved = f"{missing}; {self._next_start()}"
            logger.warning("%s; the model holds the last weights: save them elsewhere", self.unsaved)

    def _next_start(self) -> str:
        assert self.directory is not None
        there = kept_in(self.directory).found()
        start = f"continues from version {max(there)}" if there else "starts over"
        return f"a server that is started again {start}"
