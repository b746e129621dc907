"""Complete rounds on disk: the server's state, which client states are valid, and the history, under one name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.durable import CheckpointDirectory, write_file
from thinwire.systems.federated import files
from thinwire.systems.federated.history import History

_NAME, _VERSIONS = "round", "client versions"
_NOW = {"cohort": "clients_per_round", "clip": "max_grad_norm", "decay": "lr_decay"}
"""Names in older checkpoints, and today's names for them."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        round: the next one to run.
        server: tensors by name. versions: of the client states; None if the algorithm has none.
        history: up to now. facts: about the run that wrote the checkpoint.
    """

    round: int
    server: Mapping[str, Tensor]
    versions: Tensor | None
    history: History
    facts: Mapping[str, Any]


def save(
    folder: Path, round: int, server: Mapping[str, Tensor], versions: Tensor | None, history: History, facts: Any
) -> None:
    """Write the checkpoint of a round, completely or not at all (one rename decides), and remove the previous one.

    Raises:
        OSError: it could not be written; nothing of it remains.
    """
    tensors = dict(server)
    if versions is not None:
        tensors[_VERSIONS] = versions
    with CheckpointDirectory(folder, _NAME, keep=1).write(round) as partial:
        write_file(partial / "server.safetensors", files.pack(tensors))
        write_file(partial / "run.json", json.dumps({"facts": facts, "history": history.to_json()}))


def load(folder: Path, facts: Mapping[str, Any]) -> Restored | None:
    """Return the newest complete checkpoint; None if there is none.

    Raises:
        ValueError: it belongs to another run; the message names the first difference.
    """
    found = CheckpointDirectory(folder, _NAME).found()
    if not found:
        return None
    done, path = list(found.items())[-1]
    run = json.loads((path / "run.json").read_text())
    written = _renamed(run["facts"])
    for key in facts:
        if written.get(key) != facts[key]:
            raise ValueError(
                f"{folder} contains a run with {key} = {written.get(key)}, but this one has {facts[key]}: "
                "give the same, or another folder"
            )
    tensors = files.unpack((path / "server.safetensors").read_bytes())
    versions = tensors.pop(_VERSIONS, None)
    history = History.from_json(run["history"])
    return Restored(done + 1, tensors, None if versions is None else versions.to(torch.int32), history, written)


def _renamed(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {_NOW.get(key, key): _renamed(value) if key == "inner" else value for key, value in facts.items()}
