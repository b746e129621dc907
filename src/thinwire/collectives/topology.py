"""Which rank sits on which machine, from torchrun's variables."""

from __future__ import annotations

import os

import torch.distributed as dist

from thinwire.program.topology import Topology


def topology_of(world: int) -> Topology:
    """LOCAL_WORLD_SIZE ranks on each machine where the group is the whole job; else every rank on one of its own.

    Args:
        world: ranks of the group.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whole = dist.is_available() and dist.is_initialized() and world == dist.get_world_size()
    return Topology(world, local if whole and local > 0 and world % local == 0 else 1)
