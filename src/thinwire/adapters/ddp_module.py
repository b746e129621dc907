"""The hook on a model that a framework may have wrapped in DDP.

Unlike ``ddp_hook`` alone, ``register`` knows the wrapped model: names, seeds and dense parameters are as with
``attach``.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPSync, ddp_hook
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Method, Topology
from thinwire.engine.local import Local
from thinwire.engine.local.settings import check_name, named_local

log = logging.getLogger("thinwire")


def chosen(method: Method | Local | str, **options: Any) -> Method | Local:
    check_name(method)
    local = named_local(method, options)
    if local is not None and local.own_pace:
        raise ValueError(
            'pace="own" needs a loop whose steps come from sync.steps(total), but here the framework counts them, the '
            "same on every rank: use thinwire.attach in your own loop"
        )
    return local or checked(method, **options)


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
