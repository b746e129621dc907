"""What the adapters of trainers share: the hook on a model that a framework may have wrapped in DDP, and checkpoints.

Unlike ``ddp_hook`` alone, ``register`` knows the wrapped model: names, seeds and dense parameters are as with
``attach``. A checkpoint holds all ranks' states, gathered on rank 0 or one file per rank in a folder: residuals differ
between ranks, with local steps everything does, and most frameworks save only rank 0's objects.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPSync, control_device, ddp_hook
from thinwire.core.durable import read_file, readable, write_whole
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Method, Topology
from thinwire.engine.local import Local
from thinwire.engine.local.settings import named_local

if TYPE_CHECKING:
    from thinwire.adapters.local_ddp import Rank

log = logging.getLogger("thinwire")


def chosen(method: Method | Local | str, **options: Any) -> Method | Local:
    return named_local(method, options) or checked(method, **options)


def checked(method: Method | Local | str, **options: Any) -> Method:
    """Return the method if it works as a DDP hook: neither "auto" nor decoupled."""
    if isinstance(method, str) and method.lower() == "auto":
        raise ValueError(
            '"auto" chooses buckets too, but DDP makes them here: name a method (`thinwire plan` or `thinwire bench` '
            "say which), or use thinwire.attach in your own loop"
        )
    ddp_hook(method, **options)
    assert not isinstance(method, Local)
    return resolve(method, **options)


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Return the DDP wrapper, even inside what ``torch.compile`` returns; None for a bare model."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def register(
    model: Any,
    method: Method,
    *,
    framework: str,
    world_size: int,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    topology: Topology | None = None,
) -> DDPSync:
    """Register a method's hook on the framework's model, which on one rank may be bare; before its first backward."""
    ddp = ddp_of(model)
    if ddp is None:
        if world_size > 1:
            raise ValueError(no_ddp(model, framework))
        sync, _ = ddp_hook(method, topology=Topology(1))
        sync.learn_names(model)
        log.info("thinwire: one rank only: nothing is sent, so nothing is compressed")
        return sync
    process_group = None if ddp.process_group == dist.group.WORLD else ddp.process_group
    if topology is not None and topology.world_size != dist.get_world_size(process_group):
        topology = None
    sync, hook = ddp_hook(
        method, scaler=scaler, start_compression_step=start_compression_step, timeout=timeout,
        process_group=process_group, topology=topology,
    )  # fmt: skip
    sync.learn_names(inside(ddp))
    register_hook(ddp, framework, sync, hook)
    return sync


def no_ddp(model: Any, framework: str) -> str:
    if isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules()):
        return (
            f"{framework} gives a model that FSDP2 has sharded: thinwire averages its weights between sites, by local "
            'steps. Let your script shard it, over mesh["shard"], and give sites=mesh["site"] to this line, or to '
            "thinwire.adapters.fsdp2.attach"
        )
    return (
        f"{framework} gives a {type(model).__name__}, not a DistributedDataParallel, which thinwire hooks into: "
        "choose plain DDP there (FSDP, DeepSpeed and model parallelism shard the model)"
    )


def register_hook(ddp: DistributedDataParallel, framework: str, state: Any, hook: Any) -> None:
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise RuntimeError(
            f"the model that {framework} has wrapped already has a communication hook, and DDP accepts only one: leave "
            "the other one out"
        ) from error


def inside(ddp: DistributedDataParallel) -> nn.Module:
    inner = getattr(ddp.module, "_orig_mod", ddp.module)
    assert isinstance(inner, nn.Module)
    return inner


_OWED = ("residual/", "local/", "offset/")
_OWN = (*_OWED, "sent/", "own/")


def gathered_state(sync: Rank) -> dict[str, Any]:
    """Return all ranks' states on rank 0, else this rank's, on the CPU. All ranks must call it, between steps."""
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


def save_in(folder: Path, name: str, sync: Rank, **facts: Any) -> None:
    """Write this rank's file atomically, with ``facts``, plain values. No collective."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_file(folder, name, sync.state.rank), {"state": _on_cpu(sync.state_dict()), **facts})


def load_from(folder: Path, name: str, sync: Rank, **facts: Any) -> bool:
    """Load what ``save_in`` wrote; on other ranks, the mean. All ranks must call it. False: there is no rank's file.

    If only some ranks have saved (under ``if is_main_process``), all take over rank 0's part: residuals begin at zero,
    local steps at the outer weights. What is wrong on one rank is an error on all.
    """
    first = _file(folder, name, 0)
    if not sync.agree(first.exists() or _file(folder, name, sync.state.rank).exists()):
        return False
    problem, some = None, False
    try:
        if first.exists():  # is a file that this rank needs not here?
            before = int(read_file(first)["state"]["world_size"])
            needed = [sync.state.rank] if before == sync.state.size else range(before)
            some = not all(_file(folder, name, rank).exists() for rank in needed)
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


def _read(folder: Path, name: str, sync: Rank, facts: Mapping[str, Any]) -> dict[str, Any]:
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
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu()
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value

    return {key: moved(value) for key, value in state.items()}
