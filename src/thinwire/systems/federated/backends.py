"""The two back ends of a run: K devices in turn in one process, or one device per rank of the process group.

In one process, the coordinator runs with a clock driven by measured or given seconds, and computes what K processes
would; with one device it is plain sequential simulation.

With ranks there is no server: each trains its share of the cohort, and one all-reduce adds up the sums. All ranks run
the same server arithmetic; its state is compared by hash. If a rank is lost, the run stops with an error on all others,
and continues from the last checkpoint when it is started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.groups import bounded, seconds_of, topology_of
from thinwire.core.kernels.lowrank import basis_hash
from thinwire.core.program import AllReduce, Program
from thinwire.engine.ranks.communicator import Communicator
from thinwire.systems.federated.clocks import Speed
from thinwire.systems.federated.coordinator import Coordinator, DeviceLost, drive
from thinwire.systems.federated.device import Device, RoundTask, Sums, bytes_of
from thinwire.systems.federated.schedule import Assignment, ClientTime, Planner
from thinwire.systems.federated.state import pack, unpack

T = TypeVar("T")


@dataclass
class VisitReport:
    sums: Sums
    device_seconds: float
    predicted_seconds: float | None
    schedule: str
    busy_seconds: tuple[float, ...]
    bytes_up: int = 0
    bytes_down: int = 0
    control_bytes: int = 0
    lost_devices: tuple[int, ...] = ()


class InProcess:
    """The back end ``"inprocess"``: one model, which all devices use in turn.

    ``speeds``: for their clock; None: measured seconds. A device that ``faults`` names is back in the next round.
    """

    def __init__(
        self, device: Device, planner: Planner, speeds: Sequence[Speed] | None = None,
        faults: Mapping[tuple[int, int], float] | None = None,
    ) -> None:  # fmt: skip
        if speeds is not None and len(speeds) != planner.devices:
            raise ValueError(f"speeds has {len(speeds)} entries for {planner.devices} devices")
        self._device, self._planner, self._speeds, self._faults = device, planner, speeds, dict(faults or {})

    def visit(self, task: RoundTask, cohort: Sequence[int]) -> VisitReport:
        device, count = self._device, self._planner.devices
        sizes = [device.clients.samples(client) for client in cohort]
        name, assignment = self._planner.plan(task.round, task.request.name, sizes)
        coordinator = Coordinator(len(cohort), assignment, range(count))
        open_: dict[int, Sums] = {}
        reports: dict[int, list[Sums]] = {}
        worked: set[int] = set()

        def train(where: int, i: int, following: int | None) -> float:
            worked.add(where)
            into = open_.setdefault(where, device.empty())
            measured = device.train(task, cohort[i], into, None if following is None else cohort[following])
            return measured if self._speeds is None else self._speeds[where].train_seconds(sizes[i])

        def lost(where: int, held: Sequence[int]) -> None:
            open_.pop(where, None)
            if device.store is not None:
                device.store.withdraw(cohort[i] for i in held)

        outcome = drive(
            coordinator,
            count,
            train,
            on_report=lambda where: reports.setdefault(where, []).append(open_.pop(where)),
            on_lost=lost,
            losses={where: after for (round, where), after in self._faults.items() if round == task.round},
        )
        parts = [part for _, of_device in sorted(reports.items()) for part in of_device]
        total = device.empty()
        for part in parts:
            total.merge(part)
        records = [ClientTime(where, cohort[i], sizes[i], seconds) for where, i, seconds in outcome.records]
        self._planner.learn(task.request.name, records)
        return VisitReport(
            sums=total,
            device_seconds=outcome.seconds,
            predicted_seconds=assignment.predicted_seconds,
            schedule=name,
            busy_seconds=outcome.busy_seconds,
            bytes_up=sum(bytes_of(part.sums.sums.values()) for part in parts),
            bytes_down=len(worked) * bytes_of(task.request.payload.values()),
            control_bytes=sum(bytes_of(row.values()) for row in total.collected.values()),
            lost_devices=tuple(coordinator.lost_devices),
        )

    def commit(self, round: int) -> None:
        if self._device.store is not None:
            self._device.store.prepare()
            self._device.store.commit(round)


class AllReduceBackend:
    """The back end ``"ranks"``: the ranks of the default process group, each with a device of its own."""

    def __init__(self, device: Device, planner: Planner, communicator: Communicator) -> None:
        self._device, self._planner, self._comm = device, planner, communicator
        self._rank = communicator.rank
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._visits = 0
        number = self._store.add("thinwire/federated/runs", 1) if self._rank == 0 else 0
        self._run = int(self._comm.gather(str(number).encode())[0])  # counters of earlier runs are used up

    def visit(self, task: RoundTask, cohort: Sequence[int]) -> VisitReport:
        sizes = [self._device.clients.samples(client) for client in cohort]
        name, assignment = self._planner.plan(task.round, task.request.name, sizes)
        # rank 0's plan: fits are floats, which another machine may round differently
        plan = assignment.to_json().encode() if self._rank == 0 else b""
        agreed = Assignment.from_json(self.guarded(task.round, lambda: self._comm.gather(plan))[0])
        began = time.perf_counter()
        mine = self._train(task, cohort, agreed)
        facts = _packed(mine, time.perf_counter() - began)
        report = [_unpacked(row) for row in self.guarded(task.round, lambda: self._comm.gather(facts))]
        sent = self._comm.ledger.total
        shapes = {name: shape for row in report for name, shape in row["shapes"].items()}
        flat = mine.sums.flat(shapes, self._device.workspace.device)
        total = self.guarded(task.round, lambda: self._comm.run(_summed(flat), "sums"))
        records = [ClientTime(rank, *row) for rank, one in enumerate(report) for row in one["seconds"]]
        self._planner.learn(task.request.name, records)
        seconds = tuple(float(one["busy"]) for one in report)
        return VisitReport(
            sums=self._merged(total, shapes, report),
            device_seconds=max(seconds),
            predicted_seconds=assignment.predicted_seconds,
            schedule=name,
            busy_seconds=seconds,
            bytes_up=self._comm.ledger.total - sent,
            control_bytes=len(plan) + len(facts),
        )

    def commit(self, round: int) -> None:
        store = self._device.store
        if store is None:
            return
        mine = json.dumps(store.prepare()).encode()
        everyone = self.guarded(round, lambda: self._comm.gather(mine))
        store.commit(round, [client for row in everyone for client in json.loads(row)])

    def check_state(self, round: int, state: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError``, naming the tensor, if the server's state differs between ranks."""
        hashes = {f"after round {round}, {name}": basis_hash(x) for name, x in state.items()}
        self.guarded(round, lambda: self._comm.agree(hashes))

    def guarded(self, round: int, exchange: Callable[[], T]) -> T:
        """Run an exchange; ``DeviceLost``: another rank is gone."""
        try:
            return exchange()
        except (RuntimeError, TimeoutError) as error:
            words = str(error).splitlines()[0][:200]
            raise DeviceLost(
                f"rank {self._rank}: another rank was lost in round {round} ({words}). Start the run again: with "
                "checkpoint_dir= it continues from the last complete round"
            ) from error

    def _train(self, task: RoundTask, cohort: Sequence[int], assignment: Assignment) -> Sums:
        self._visits += 1
        if assignment.queue is None:
            return self._device.train_list(task, [cohort[i] for i in assignment.lists[self._rank]])
        into = self._device.empty()
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
            sums.add_metrics(row["metrics"])
            for key, x in row["collected"].items():
                client, _, name = key.partition("/")
                sums.collected.setdefault(int(client), {})[name] = x
        return sums


def _packed(mine: Sums, busy: float) -> bytes:
    """Return what is not summed as tensors: JSON, followed by the collected values as safetensors."""
    names = ("samples", "clients", "seconds", "failed", "metrics", "sent_bytes")
    facts = {name: getattr(mine, name) for name in names}
    shapes = {name: list(x.shape) for name, x in mine.sums.sums.items()}
    facts |= {"shapes": shapes, "bounds": mine.sums.bounds, "busy": busy}
    collected = {f"{c}/{name}": x for c, row in mine.collected.items() for name, x in row.items()}
    head = json.dumps(facts).encode()
    return len(head).to_bytes(8, "little") + head + (pack(collected) if collected else b"")


def _unpacked(message: bytes) -> dict[str, Any]:
    size = int.from_bytes(message[:8], "little")
    row: dict[str, Any] = json.loads(message[8 : 8 + size])
    rest = message[8 + size :]
    return {**row, "collected": unpack(rest) if rest else {}}


def _summed(flat: Tensor) -> Program:
    if flat.numel():
        flat = yield AllReduce(flat)
    return flat


def join(device: torch.device, timeout: float | None) -> Communicator:
    """Return this rank's communicator, with its own lanes besides other uses of the process group."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    return Communicator(None, topology_of(dist.get_world_size()), device, limit)
