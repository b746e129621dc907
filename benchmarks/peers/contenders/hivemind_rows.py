"""hivemind: a swarm over libp2p; its Optimizer averages when the swarm has seen so many samples."""

from __future__ import annotations

import logging
import socket
from typing import Any

import hivemind
import torch
import torch.distributed as dist

from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer

ADDRESS_BYTES = 200


def local_updates(workload: Workload, group: Any, every: int = 16, matchmaking: float = 1.0) -> Trainer:
    """``use_local_updates``: every rank steps by itself, and parameters are averaged every ``every`` steps."""
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    workers = dist.get_world_size(group)
    dht = _swarm(group)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="thinwire-peers",
        batch_size_per_step=1,  # counted in batches of one rank
        target_batch_size=every * workers,
        params=list(workload.model.parameters()),
        optimizer=lambda parameters: workload.optimizer(_Parameters(parameters)),
        matchmaking_time=matchmaking,
        averaging_timeout=30.0,
        averager_opts={"target_group_size": workers},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.1, "max_refresh_period": 1.0},
        use_local_updates=True,
    )

    def close() -> None:
        optimizer.shutdown()
        dht.shutdown()

    return Trainer(workload.model, optimizer, close, every)


class _Parameters(torch.nn.Module):
    """What the workload's optimizer takes from a module: its parameters, here those that hivemind names."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self._given = list(parameters)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._given)


def _swarm(group: Any) -> Any:
    """A DHT of all ranks; rank 0 is whom the others ask first."""
    here = socket.gethostbyname(socket.gethostname())
    own = {"host_maddrs": [f"/ip4/{here}/tcp/0"], "use_auto_relay": False, "use_relay": False, "start": True}
    first = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8)
    dht = None
    if dist.get_rank(group) == 0:
        dht = hivemind.DHT(**own)
        address = str(dht.get_visible_maddrs()[0]).encode()
        first[: len(address)] = torch.tensor(list(address), dtype=torch.uint8)
    dist.broadcast(first, 0, group=group)
    if dht is None:
        dht = hivemind.DHT(initial_peers=[bytes(first.tolist()).rstrip(b"\0").decode()], **own)
    dist.barrier(group)
    return dht
