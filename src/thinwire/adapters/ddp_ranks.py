"""The states of all ranks for a framework's checkpoint: gathered on rank 0, or one file per rank in a folder.

Residuals differ between ranks, with local steps everything does, and most frameworks save only rank 0's objects.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.adapters.ddp import DDPSync, control_device
from thinwire.adapters.local_ddp import LocalRank
from thinwire.core.durable import read_file, readable, write_whole

log = logging.getLogger("thinwire")

_OWED = ("residual/", "local/", "offset/")
_OWN = (*_OWED, "sent/", "own/")


def gathered_state(sync: DDPSync | LocalRank) -> dict[str, Any]:
    """Return all ranks' states on rank 0 and this rank's elsewhere, on the CPU. All ranks must call it, between steps.

    Each rank's own part is sent to rank 0 in turn, uncompressed.

    Raises:
        ValueError: on all ranks, if the state of one has an object that could not be read again; names its key.
    """
    problem, state = None, _on_cpu(sync.state_dict())
    try:
        state = readable(state)
    except ValueError as error:
        problem = error
    if sync.agree(problem is not None):
        raise ValueError(f"nothing was saved: {problem or 'another rank says why'}") from problem
    if not sync.agree(any(key.startswith(_OWN) for key in state)) or sync.state.size == 1:
        return state
    device, group = control_device(sync.process_group), sync.process_group
    if sync.state.rank == 0:
        for rank in range(1, sync.state.size):
            state.update(_received(dist.get_global_rank(group, rank), group, device))
    else:
        file = io.BytesIO()
        torch.save({key: value for key, value in state.items() if key.startswith(_OWN)}, file)
        message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
        root = dist.get_global_rank(group, 0)
        dist.send(torch.tensor([message.numel()], device=device), root, group=group)
        dist.send(message, root, group=group)
    return state


def _received(source: int, group: Any, device: torch.device) -> Mapping[str, Any]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, source, group=group)
    message = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(message, source, group=group)
    found: Mapping[str, Any] = torch.load(io.BytesIO(message.cpu().numpy().tobytes()), weights_only=True)
    return found


def save_in(folder: Path, name: str, sync: DDPSync | LocalRank, **facts: Any) -> None:
    """Write this rank's file atomically, with plain values (``facts``). No collective."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_file(folder, name, sync.state.rank), {"state": _on_cpu(sync.state_dict()), **facts})


def load_from(folder: Path, name: str, sync: DDPSync | LocalRank, **facts: Any) -> bool:
    """Load what ``save_in`` wrote; on another number of ranks, the mean. All ranks must call it.

    If only some ranks have saved, as in scripts that save under ``if is_main_process``, all take over rank 0's part,
    and the log says so unless nothing is lost: residuals begin at zero, and local steps at the outer weights.

    Returns:
        Whether any rank found a file; if none did, nothing has changed.

    Raises:
        ValueError: on all ranks, if one finds no file, other ``facts`` in it, or a state that does not fit.
    """
    first = _file(folder, name, 0)
    if not sync.agree(first.exists() or _file(folder, name, sync.state.rank).exists()):
        return False
    problem: Exception | None = None
    some = False
    try:
        some = _lacks(folder, name, sync)
    except (OSError, ValueError, KeyError) as error:
        problem = error
    some = sync.agree(some)
    try:
        if problem is None:
            sync.load_state_dict(_first_of(folder, name, facts) if some else _read(folder, name, sync, facts))
    except (OSError, ValueError, KeyError) as error:
        problem = error
    if sync.agree(problem is not None):
        reason = problem or "another rank could not read its own, and says why"
        raise ValueError(f"no state of thinwire's hook can be loaded from {folder}: {reason}") from problem
    return True


def _read(folder: Path, name: str, sync: DDPSync | LocalRank, facts: Mapping[str, Any]) -> dict[str, Any]:
    own, start = _file(folder, name, sync.state.rank), _file(folder, name, 0)
    if not start.exists():  # the folder belongs to another machine
        start = own
    if not start.exists():
        raise ValueError(f"there is no {own.name}; all ranks must save, and must see the folder that they load from")
    content = read_file(start)
    state: dict[str, Any] = content["state"]
    before = int(state["world_size"])
    if before == sync.state.size:
        mine = content if own == start else read_file(own)
        _check(own, mine, facts)
        found: dict[str, Any] = mine["state"]
        if (found["step"], found["world_size"]) != (state["step"], before):
            raise ValueError(f"{own.name} is from another step or number of ranks than {start.name}")
        return found
    _check(start, content, facts)
    for rank in range(before):
        other = _file(folder, name, rank)
        theirs = read_file(other)["state"]
        if theirs["step"] != state["step"]:
            raise ValueError(f"{other.name} is from another step than {start.name}")
        state.update({key: value for key, value in theirs.items() if key.startswith(_OWN)})
    return state


def _lacks(folder: Path, name: str, sync: DDPSync | LocalRank) -> bool:
    """Return whether rank 0's file is here, and one that this rank needs is not."""
    first = _file(folder, name, 0)
    if not first.exists():
        return False
    before = int(read_file(first)["state"]["world_size"])
    needed = [sync.state.rank] if before == sync.state.size else range(before)
    return not all(_file(folder, name, rank).exists() for rank in needed)


def _first_of(folder: Path, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's state, as of a training on one rank, without what is owed to the model."""
    first = _file(folder, name, 0)
    content = read_file(first)
    _check(first, content, facts)
    state: dict[str, Any] = content["state"]
    if any(key.startswith(_OWN) for key in state):
        log.warning(
            "thinwire: %s has only some ranks' states, so residuals begin at zero, and local steps at the outer "
            "weights: call save_state on all ranks to keep both",
            folder,
        )
    return {k: x for k, x in state.items() if not k.startswith(_OWED)} | {"world_size": 1, "residuals": 0}


def _check(path: Path, content: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        if content.get(key) != value:
            raise ValueError(f"{path.name} does not belong to the model's {key}: it was saved by another run or step")


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}_rank{rank}.pt"


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _moved(value) for key, value in state.items()}


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _moved(one) for key, one in value.items()}
    return type(value)(map(_moved, value)) if isinstance(value, (list, tuple)) else value
