"""Small exchanges on the process group that DDP was given, between steps."""

from __future__ import annotations

import torch
import torch.distributed as dist


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors must be for the group to carry them; None is the default group."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank of the group raises the flag; equal on all of them."""
    raised = torch.tensor([int(flag)], device=control_device(group))
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
    return bool(raised.item())
