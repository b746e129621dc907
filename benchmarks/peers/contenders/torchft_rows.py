"""torchft: every rank is a replica group of its own; DDP, LocalSGD and DiLoCo under its manager's votes."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer

PATIENCE = timedelta(seconds=60)
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo's paper, table 5


class Replica:
    """A manager of this rank, with the store that it needs; rank 0 also runs the lighthouse of all."""

    def __init__(self, group: Any, *, synchronous: bool) -> None:
        for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        rank, workers = dist.get_rank(group), dist.get_world_size(group)
        here = socket.gethostbyname(socket.gethostname())
        port = torch.zeros(5, dtype=torch.int64)
        self.lighthouse = None
        if rank == 0:
            self.lighthouse = LighthouseServer("0.0.0.0:0", min_replicas=workers, join_timeout_ms=100)
            bytes_and_port = [*map(int, here.split(".")), int(self.lighthouse.address().rpartition(":")[2])]
            port = torch.tensor(bytes_and_port)
        dist.broadcast(port, 0, group=group)
        address = ".".join(map(str, port[:4].tolist()))
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=workers,
            use_async_quorum=not synchronous,
            timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self.store.port,
            lighthouse_addr=f"http://{address}:{int(port[4])}",
            replica_id=f"replica_{rank}",
            hostname=here,
            init_sync=False,  # the weights are equal: all ranks made them from one seed
            max_retries=2,
        )

    def close(self) -> None:
        """End manager and lighthouse."""
        self.manager.shutdown(wait=False)
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


def ddp(workload: Workload, group: Any) -> Trainer:
    """Its DistributedDataParallel, with the quorum before each forward pass and the vote before each step."""
    replica = Replica(group, synchronous=False)
    module = DistributedDataParallel(replica.manager, workload.model)
    module.register_forward_pre_hook(lambda *_: replica.manager.start_quorum())
    return Trainer(module, _Voted(replica.manager, workload.optimizer(workload.model)), replica.close)


def local_sgd(workload: Workload, group: Any, every: int = 8) -> Trainer:
    """Its LocalSGD: the parameters are averaged every so many steps."""
    replica, optimizer = Replica(group, synchronous=False), workload.optimizer(workload.model)
    LocalSGD(replica.manager, workload.model, optimizer, sync_every=every).__enter__()
    return Trainer(workload.model, optimizer, replica.close, every)


def diloco(workload: Workload, group: Any, every: int = 8) -> Trainer:
    """Its DiLoCo in one fragment: the change of so many steps is averaged and given to an outer Nesterov step."""
    replica, optimizer = Replica(group, synchronous=True), workload.optimizer(workload.model)
    outer = torch.optim.SGD(workload.model.parameters(), **OUTER)
    DiLoCo(replica.manager, [workload.model], optimizer, outer, sync_every=every, use_bucketization=True).__enter__()
    return Trainer(workload.model, optimizer, replica.close, every)


class _Voted:
    """Steps only if all replicas agree, as torchft's OptimizerWrapper; here a vote that fails is an error."""

    def __init__(self, manager: Manager, optimizer: torch.optim.Optimizer) -> None:
        self._manager, self._optimizer = manager, optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        if not self._manager.should_commit():
            raise RuntimeError("torchft discarded a step")
        self._optimizer.step()
