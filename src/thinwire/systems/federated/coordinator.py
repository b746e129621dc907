"""The server's side of one visit as a state machine: messages in, messages out. No threads, clock or I/O.

A device gets ``DeviceWork`` and trains the clients named in it. Then it asks for more or, if the work says that it
ends, sends one result: the sum over everything it has trained since its last result. If a device is lost, its result is
too; its clients are given to other devices with the same seeds, so the sums do not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from thinwire.systems.federated.schedule import Assignment


class DeviceLost(RuntimeError):
    """No device is left, or one is gone that the back end cannot do without."""


@dataclass(frozen=True)
class DeviceWork:
    """For a device: train these clients (indices into the cohort), then send the sum, or ask again."""

    device: int
    clients: tuple[int, ...]
    ends: bool


class Coordinator:
    """One visit of one cohort.

    Args:
        cohort: number of clients, which are named by index.
        assignment: lists, or a queue from which devices pull.
        devices: ids of the devices that take part.

    Attributes:
        reported: clients whose sums have arrived.
        lost_devices: in the order in which they were lost.
    """

    def __init__(self, cohort: int, assignment: Assignment, devices: Collection[int]) -> None:
        self._cohort = cohort
        self._lists = assignment.lists
        self._pulling = assignment.queue is not None
        self._queue: deque[int] = deque(assignment.queue or ())
        self._alive = sorted(devices)
        self._holding: dict[int, list[int]] = {device: [] for device in self._alive}
        self._idle: set[int] = set()
        self.reported: list[int] = []
        self.lost_devices: list[int] = []

    @property
    def done(self) -> bool:
        """Whether all clients' sums have arrived."""
        return len(self.reported) == self._cohort

    def start(self) -> list[DeviceWork]:
        """Return the first work of every device that has any."""
        works = []
        for place, device in enumerate(self._alive):
            if self._pulling:
                works.append(self._next(device))
            else:
                mine = self._lists[place] if place < len(self._lists) else ()
                self._holding[device] = list(mine)
                works.append(DeviceWork(device, tuple(mine), True))
        begun = [work for work in works if work.clients]
        self._idle = {work.device for work in works if not work.clients}
        return begun

    def ask(self, device: int) -> DeviceWork:
        """Return the next client for a free device, or the end.

        Raises:
            DeviceLost: it was declared lost; its work is not used.
        """
        self._check(device)
        return self._next(device)

    def result(self, device: int) -> list[DeviceWork]:
        """Note that a device's sum has arrived. Return more work if a lost device has left some.

        Raises:
            DeviceLost: it was declared lost before: the sum must not be used, because others have its clients now.
        """
        self._check(device)
        self.reported += self._holding[device]
        self._holding[device] = []
        self._idle.add(device)
        return self._wake() if self._queue else []

    def lost(self, device: int) -> list[DeviceWork]:
        """Note that a device is gone, with everything it has not sent. Return work for idle devices.

        Raises:
            DeviceLost: it was the last device.
        """
        if device not in self._alive:
            return []
        self._alive.remove(device)
        self._idle.discard(device)
        self.lost_devices.append(device)
        self._queue.extend(self._holding.pop(device))
        if not self._alive and not self.done:
            raise DeviceLost(f"device {device} was the last one; {self._cohort - len(self.reported)} clients are left")
        return self._wake() if self._queue else []

    def holders(self) -> dict[int, tuple[int, ...]]:
        """Return the clients whose sums each device has not sent yet."""
        return {device: tuple(held) for device, held in self._holding.items() if held}

    def _check(self, device: int) -> None:
        if device not in self._alive:
            raise DeviceLost(f"device {device} was declared lost; its result is not used")

    def _next(self, device: int) -> DeviceWork:
        if not self._queue:
            return DeviceWork(device, (), True)
        client = self._queue.popleft()
        self._holding[device].append(client)
        return DeviceWork(device, (client,), False)

    def _wake(self) -> list[DeviceWork]:
        works: list[DeviceWork] = []
        for device in sorted(self._idle):
            if not self._queue:
                break
            self._idle.discard(device)
            works.append(self._next(device))
        return works
