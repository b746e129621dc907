"""One process, K devices in turn: the coordinator with a clock driven by measured or given seconds.

It computes what K processes would; with one device it is plain sequential simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.systems.federated.backend import Planner, VisitReport, seconds_of
from thinwire.systems.federated.clocks import Speed
from thinwire.systems.federated.coordinator import Coordinator
from thinwire.systems.federated.device import Device, RoundTask, Sums
from thinwire.systems.federated.estimate import ClientTime
from thinwire.systems.federated.events import drive


class InProcess:
    """The back end ``"inprocess"``.

    Args:
        device: the one model that all devices use in turn.
        planner: distributes the cohort.
        speeds: of the devices, for their clock; None: measured seconds.
        faults: (round, device) -> seconds after which the device is lost in that round (it is back in the next).
    """

    def __init__(
        self,
        device: Device,
        planner: Planner,
        speeds: Sequence[Speed] | None = None,
        faults: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        if speeds is not None and len(speeds) != planner.devices:
            raise ValueError(f"speeds has {len(speeds)} entries for {planner.devices} devices")
        self._device, self._planner = device, planner
        self._speeds = speeds
        self._faults = dict(faults or {})
        self.devices = planner.devices

    def visit(self, task: RoundTask, cohort: Sequence[int]) -> VisitReport:
        """Visit all clients of the cohort once."""
        device, sizes = self._device, [self._device.clients.samples(client) for client in cohort]
        name, assignment = self._planner.plan(task.round, task.request.name, sizes)
        coordinator = Coordinator(len(cohort), assignment, range(self.devices))
        open_: dict[int, Sums] = {}
        reports: list[tuple[int, Sums]] = []
        worked: set[int] = set()

        def train(where: int, i: int, following: int | None) -> float:
            worked.add(where)
            into = open_.setdefault(where, device.empty())
            measured = device.train(task, cohort[i], into, None if following is None else cohort[following])
            return seconds_of(None if self._speeds is None else self._speeds[where], measured, sizes[i])

        def lost(where: int, held: Sequence[int]) -> None:
            open_.pop(where, None)
            if device.store is not None:
                device.store.withdraw(cohort[i] for i in held)

        outcome = drive(
            coordinator,
            self.devices,
            train,
            on_report=lambda where: reports.append((where, open_.pop(where))),
            on_lost=lost,
            losses={where: after for (round, where), after in self._faults.items() if round == task.round},
        )
        total = device.empty()
        for _, part in sorted(reports, key=lambda report: report[0]):
            total.merge(part)
        records = [ClientTime(where, cohort[i], sizes[i], seconds) for where, i, seconds in outcome.records]
        self._planner.learn(task.round, task.request.name, records)
        return VisitReport(
            sums=total,
            device_seconds=outcome.seconds,
            predicted_seconds=assignment.predicted_seconds,
            schedule=name,
            busy_seconds=outcome.busy_seconds,
            bytes_up=sum(_bytes(part.sums.sums) for _, part in reports),
            bytes_down=len(worked) * sum(x.numel() * x.element_size() for x in task.request.payload.values()),
            control_bytes=sum(_bytes(row) for row in total.collected.values()),
            lost_devices=tuple(coordinator.lost_devices),
        )

    def commit(self, round: int) -> None:
        """End the round: make the clients' new states valid."""
        if self._device.store is not None:
            self._device.store.prepare()
            self._device.store.commit(round)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())
