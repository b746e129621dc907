"""Which backend of a process group serves the tensors of a device."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_for(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return "gloo", "nccl" or another name; None if the group has no backend for this device.

    ``init_process_group`` takes "gloo", "cpu:gloo,cuda:nccl" or nothing, and ``dist.get_backend`` returns just that;
    this returns what the group then uses.
    """
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}.get(device.type)


def backends_to_ask_for(device: torch.device) -> str:
    """Return what ``init_process_group`` should be given where models are on this device."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def backend_of_new(group: dist.ProcessGroup | None) -> str | None:
    """Return what ``new_group`` must be given for the backends of ``group``; None if the default group has the same."""
    config = dist.get_backend_config(group)
    return None if config == dist.get_backend_config() else config
