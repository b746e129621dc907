"""Which rank is on which machine, from torchrun's variables."""

from __future__ import annotations

import os

import torch.distributed as dist

from thinwire.core.program.topology import Topology


def topology_of(world: int) -> Topology:
    """Return LOCAL_WORLD_SIZE ranks per machine if the group is the whole job; else a machine for every rank.

    Args:
        world: number of ranks in the group.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whole = dist.is_available() and dist.is_initialized() and world == dist.get_world_size()
    return Topology(world, local if whole and local > 0 and world % local == 0 else 1)
