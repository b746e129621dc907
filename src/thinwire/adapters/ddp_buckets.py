"""A fusion plan as DDP's argument ``bucket_cap_mb_list``: the sizes of its buckets one by one.

DDP fills buckets with neighbours in the order in which gradients arrived in its first backward, and closes a bucket
when it holds at least its limit. A limit equal to the size of a plan's bucket therefore closes it at the same place.
(In the first backward, DDP uses the order of registration, with the same limits.)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from thinwire.core.program import Plan

_MIB = 1 << 20


def bucket_arguments(plan: Plan, model: nn.Module | Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallel`` that make it fuse as a plan does.

    Args:
        plan: such as ``sync.plan``, or ``Plan.from_json`` of what ``thinwire plan --out`` wrote. If a plan has several
            phases, the first is used, since DDP has only one.
        model: the model of the plan, or the bytes of each of its gradients by name.

    Returns:
        ``{"bucket_cap_mb_list": [...]}``, in MiB; if this torch has no such argument, ``{"bucket_cap_mb": ...}`` with
        the mean size.

    Raises:
        ValueError: the plan is not of this model, or DDP cannot fuse like that: parameters of several dtypes, or some
            in plain buckets of their own alongside compressed ones.
    """
    size = _sizes(model) if isinstance(model, nn.Module) else dict(model)
    plan.check(size)
    buckets = plan.buckets()
    if len({bucket.dense for bucket in buckets}) > 1:
        raise ValueError(
            "the plan keeps some parameters in their own plain buckets, but DDP's hold only neighbours: use a plan for "
            "ssgd, cast or acp"
        )
    caps = [sum(size[name] for name in bucket.names) / _MIB for bucket in buckets]
    if has_bucket_list():
        return {"bucket_cap_mb_list": caps}
    return {"bucket_cap_mb": sum(caps) / len(caps)}


def has_bucket_list() -> bool:
    return "bucket_cap_mb_list" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters


def _sizes(model: nn.Module) -> dict[str, int]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds: set[torch.dtype] = {p.dtype for p in trained.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"the model's parameters have {len(kinds)} dtypes, and DDP splits each of them by the same list: set "
            "bucket_cap_mb instead"
        )
    return {name: p.numel() * p.element_size() for name, p in trained.items()}
