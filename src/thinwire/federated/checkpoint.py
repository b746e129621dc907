"""Whole rounds on disk: the server's state, which client states count, and the history, under one name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.durable import finished, put_in_place, remove
from thinwire.federated import files
from thinwire.federated.history import History

_NAME = re.compile(r"round-(\d+)")
_VERSIONS = "client versions"
_NOW = {"cohort": "clients_per_round", "clip": "max_grad_norm", "decay": "lr_decay"}
"""Words of checkpoints from before, and what they are today."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        round: the next one to run.
        server: tensors by name. versions: of the client states; None for algorithms without.
        history: so far. facts: of the run that wrote it.
    """

    round: int
    server: Mapping[str, Tensor]
    versions: Tensor | None
    history: History
    facts: Mapping[str, Any]


def save(
    folder: Path, round: int, server: Mapping[str, Tensor], versions: Tensor | None, history: History, facts: Any
) -> None:
    """Write the checkpoint of a round and remove the one before. Whole or not at all: one rename decides.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    final, partial = folder / f"round-{round:09d}", folder / f".partial-{round:09d}"
    shutil.rmtree(partial, ignore_errors=True)
    tensors = dict(server)
    if versions is not None:
        tensors[_VERSIONS] = versions
    try:
        partial.mkdir(parents=True)
        files.write(partial / "server.safetensors", files.pack(tensors))
        files.write_json(partial / "run.json", {"facts": facts, "history": history.to_json()})
        put_in_place(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for path in finished(folder, _NAME)[:-1]:
        remove(path)


def load(folder: Path, facts: Mapping[str, Any]) -> Restored | None:
    """The newest whole checkpoint; None if there is none.

    Raises:
        ValueError: it is of another run: the first difference is named.
    """
    found = finished(folder, _NAME)
    if not found:
        return None
    run = json.loads((found[-1] / "run.json").read_text())
    written = _renamed(run["facts"])
    for key in facts:
        if written.get(key) != facts[key]:
            raise ValueError(
                f"{folder} holds a run with {key} = {written.get(key)}, and this one has {facts[key]}: "
                "give the same, or another folder"
            )
    tensors = files.unpack((found[-1] / "server.safetensors").read_bytes())
    versions = tensors.pop(_VERSIONS, None)
    done = int(found[-1].name.rpartition("-")[2])
    history = History.from_json(run["history"])
    return Restored(done + 1, tensors, None if versions is None else versions.to(torch.int32), history, written)


def _renamed(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {_NOW.get(key, key): _renamed(value) if key == "inner" else value for key, value in facts.items()}
