"""Small exchanges between steps, on the process group that was passed to DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist

from thinwire.core.collectives.groups import backend_for


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group can exchange small tensors; None is the default group."""
    cpu = torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if backend_for(cpu, group) is None else cpu


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether any rank of the group raises the flag; equal on all ranks."""
    raised = torch.tensor([int(flag)], device=control_device(group))
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
    return bool(raised.item())
