"""What a rank gets: torchrun's environment variables, which interface Gloo and NCCL should use, its node's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from thinwire.tools.lab.cluster import Cluster

_OF_ANOTHER_LAUNCHER = ("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")


def rank_environment(
    base: Mapping[str, str], cluster: Cluster, rank: int, *, master_address: str, master_port: int, interface: str
) -> dict[str, str]:
    """Build the environment of one rank.

    Args:
        base: variables to start from; those left by an outer torchrun are dropped.
        cluster: the shape of the run.
        rank: the rank.
        master_address: address at which rank 0 listens.
        master_port: port on which rank 0 listens.
        interface: the network interface that leads to the other nodes.
    """
    kept = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_") and k not in _OF_ANOTHER_LAUNCHER}
    node, local_rank = divmod(rank, cluster.ranks_per_node)
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(cluster.workers),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_NET": "Socket",  # over that interface; between nodes, which are hosts of their own,
        "NCCL_HOSTID": f"thinwire node {node}",  # and not through memory that they share only here
    }


def own_cores(node: int, nodes: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return a node's cores: equally many in a row for each; with more nodes than cores, one each, shared in turn."""
    each = len(cores) // nodes
    return tuple(cores[node * each : (node + 1) * each]) if each else (cores[node % len(cores)],)


def usable_cores() -> list[int]:
    """Return the cores that this process may use, in order; empty if the system does not report or pin them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
