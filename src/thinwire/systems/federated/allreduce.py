"""Several ranks, no server: each trains its share of the cohort, and one all-reduce adds up the sums.

All ranks run the same server arithmetic; the server's state is compared by hash. If a rank is lost, the run stops with
an error on all others, and continues from the last checkpoint when it is started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.groups import bounded, seconds_of, topology_of
from thinwire.core.kernels.lowrank import basis_hash
from thinwire.core.program import AllReduce, Program
from thinwire.engine.ranks.communicator import Communicator
from thinwire.systems.federated import files
from thinwire.systems.federated.backend import Planner, VisitReport
from thinwire.systems.federated.coordinator import DeviceLost
from thinwire.systems.federated.device import Device, RoundTask, Sums, run_list
from thinwire.systems.federated.estimate import ClientTime
from thinwire.systems.federated.schedule import Assignment

T = TypeVar("T")


class AllReduceBackend:
    """The back end ``"ranks"``: the ranks of the default process group.

    Args:
        device: this rank's device, with its model.
        planner: distributes the cohort; its number of devices is the number of ranks.
        communicator: see ``join``.
    """

    def __init__(self, device: Device, planner: Planner, communicator: Communicator) -> None:
        self._device, self._planner, self._comm = device, planner, communicator
        self.devices = planner.devices
        self._rank = communicator.rank
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._visits = 0
        number = self._store.add("thinwire/federated/runs", 1) if self._rank == 0 else 0
        self._run = int(self._comm.gather(str(number).encode())[0])  # counters of earlier runs are used up

    def visit(self, task: RoundTask, cohort: Sequence[int]) -> VisitReport:
        """Visit all clients of the cohort once. All ranks must call this."""
        clients = self._device.clients
        sizes = [clients.samples(client) for client in cohort]
        name, assignment = self._planner.plan(task.round, task.request.name, sizes)
        # rank 0's plan: fits are floats, which another machine may round differently
        plan = assignment.to_json().encode() if self._rank == 0 else b""
        agreed = Assignment.from_json(self.guarded(task.round, lambda: self._comm.gather(plan))[0])
        began = time.perf_counter()
        mine = self._train(task, cohort, agreed)
        busy = time.perf_counter() - began
        facts = _packed(mine, busy)
        report = [_unpacked(row) for row in self.guarded(task.round, lambda: self._comm.gather(facts))]
        sent = self._comm.ledger.total
        shapes = {name: shape for row in report for name, shape in row["shapes"].items()}
        total = self.guarded(task.round, lambda: self._comm.run(_summed(mine, shapes, self._device), "sums"))
        sums = self._merged(total, shapes, report)
        records = [ClientTime(rank, *row) for rank, one in enumerate(report) for row in one["seconds"]]
        self._planner.learn(task.round, task.request.name, records)
        seconds = tuple(float(one["busy"]) for one in report)
        return VisitReport(
            sums=sums,
            device_seconds=max(seconds),
            predicted_seconds=assignment.predicted_seconds,
            schedule=name,
            busy_seconds=seconds,
            bytes_up=self._comm.ledger.total - sent,
            control_bytes=len(plan) + len(facts),
        )

    def commit(self, round: int) -> None:
        """End the round: make the clients' new states valid, on all ranks."""
        store = self._device.store
        if store is None:
            return
        mine = json.dumps(store.prepare()).encode()
        everyone = self.guarded(round, lambda: self._comm.gather(mine))
        store.commit(round, [client for row in everyone for client in json.loads(row)])

    def check_state(self, round: int, state: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError``, naming the tensor, if the server's state differs between ranks."""
        self.guarded(
            round, lambda: self._comm.agree({f"after round {round}, {k}": basis_hash(x) for k, x in state.items()})
        )

    def guarded(self, round: int, exchange: Callable[[], T]) -> T:
        """Run an exchange.

        Raises:
            DeviceLost: another rank is gone.
        """
        try:
            return exchange()
        except (RuntimeError, TimeoutError) as error:
            words = str(error).splitlines()[0][:200]
            raise DeviceLost(
                f"rank {self._rank}: another rank was lost in round {round} ({words}). Start the run again: with "
                "checkpoint_dir= it continues from the last complete round"
            ) from error

    def _train(self, task: RoundTask, cohort: Sequence[int], assignment: Assignment) -> Sums:
        into = self._device.empty()
        self._visits += 1
        if assignment.queue is None:
            run_list(self._device, task, [cohort[i] for i in assignment.lists[self._rank]], into)
            return into
        counter = f"thinwire/federated/{self._run}/{self._visits}"
        limit = seconds_of(self._comm.timeout)  # the store itself has no timeout if its host hangs

        def turns() -> int:
            return int(self.guarded(task.round, lambda: bounded(limit, lambda: self._store.add(counter, 1))))

        while (turn := turns() - 1) < len(cohort):
            self._device.train(task, cohort[assignment.queue[turn]], into)
        return into

    def _merged(self, total: Tensor, shapes: Mapping[str, list[int]], report: Sequence[dict[str, Any]]) -> Sums:
        sums = self._device.empty()
        bounds = {name: sum(row["bounds"].get(name, 0.0) for row in report) for name in shapes}
        sums.sums.take(total, shapes, bounds)
        for row in report:
            sums.samples += row["samples"]
            sums.clients += row["clients"]
            sums.seconds += [tuple(one) for one in row["seconds"]]
            sums.sent_bytes += row["sent_bytes"]
            sums.failed.update({int(client): why for client, why in row["failed"].items()})
            for name, value in row["metrics"].items():
                sums.metrics[name] = sums.metrics.get(name, 0.0) + value
            for key, x in row["collected"].items():
                client, _, name = key.partition("/")
                sums.collected.setdefault(int(client), {})[name] = x
        return sums


def _packed(mine: Sums, busy: float) -> bytes:
    """Return what is not summed as tensors: JSON, followed by the collected values as safetensors."""
    facts = {
        "samples": mine.samples,
        "clients": mine.clients,
        "seconds": mine.seconds,
        "failed": mine.failed,
        "metrics": mine.metrics,
        "sent_bytes": mine.sent_bytes,
        "shapes": mine.sums.shapes(),
        "bounds": mine.sums.bounds,
        "busy": busy,
    }
    collected = {f"{c}/{name}": x for c, row in mine.collected.items() for name, x in row.items()}
    head = json.dumps(facts).encode()
    return len(head).to_bytes(8, "little") + head + (files.pack(collected) if collected else b"")


def _unpacked(message: bytes) -> dict[str, Any]:
    size = int.from_bytes(message[:8], "little")
    row: dict[str, Any] = json.loads(message[8 : 8 + size])
    rest = message[8 + size :]
    return {**row, "collected": files.unpack(rest) if rest else {}}


def _summed(mine: Sums, shapes: Mapping[str, list[int]], device: Device) -> Program:
    """Run the one large exchange of a visit."""
    flat = mine.sums.flat(shapes, device.workspace.device)
    if flat.numel():
        flat = yield AllReduce(flat)
    return flat


def join(device: torch.device, timeout: float | None) -> Communicator:
    """Return this rank's communicator, with its own lanes besides other uses of the process group."""
    from datetime import timedelta

    world = dist.get_world_size()
    limit = None if timeout is None else timedelta(seconds=timeout)
    return Communicator(None, topology_of(world), device, limit)
