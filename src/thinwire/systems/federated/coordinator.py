"""The server's side of one visit as a state machine: messages in, messages out. No threads, clock or I/O.

A device gets ``DeviceWork`` and trains the clients named in it. Then it asks for more or, if the work says that it
ends, sends one result: the sum over everything it has trained since its last result. If a device is lost, its result is
too; its clients are given to other devices with the same seeds, so the sums do not change.

:func:`drive` runs it with devices under one simulated clock, given the seconds of each training: the in-process back
end trains inside the function that gives the seconds; ``predict`` computes them by a formula.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from thinwire.core.virtual_time import VirtualTime
from thinwire.systems.federated.schedule import Assignment

_LOST, _FREE, _WORK = 0, 1, 2  # at equal times the loss of a device comes first

Train = Callable[[int, int, "int | None"], float]
"""(device, client, next client, both as indices into the cohort) -> seconds."""


class DeviceLost(RuntimeError):
    """No device is left, or one is gone that the back end cannot do without."""


@dataclass(frozen=True)
class DeviceWork:
    """For a device: train these clients (indices into the cohort), then send the sum, or ask again."""

    device: int
    clients: tuple[int, ...]
    ends: bool


class Coordinator:
    def __init__(self, cohort: int, assignment: Assignment, devices: Collection[int]) -> None:
        self._cohort = cohort
        self._lists = assignment.lists
        self._pulling = assignment.queue is not None
        self._queue: deque[int] = deque(assignment.queue or ())
        self._alive = sorted(devices)
        self.holding: dict[int, list[int]] = {device: [] for device in self._alive}  # clients whose sums are not sent
        self._idle: set[int] = set()
        self.reported: list[int] = []
        self.lost_devices: list[int] = []

    @property
    def done(self) -> bool:
        return len(self.reported) == self._cohort

    def start(self) -> list[DeviceWork]:
        works = []
        for place, device in enumerate(self._alive):
            if self._pulling:
                works.append(self._next(device))
            else:
                mine = self._lists[place] if place < len(self._lists) else ()
                self.holding[device] = list(mine)
                works.append(DeviceWork(device, tuple(mine), True))
        self._idle = {work.device for work in works if not work.clients}
        return [work for work in works if work.clients]

    def ask(self, device: int) -> DeviceWork:
        self._check(device)
        return self._next(device)

    def result(self, device: int) -> list[DeviceWork]:
        """Note that a device's sum has arrived; it must not be used on ``DeviceLost``: others have its clients now."""
        self._check(device)
        self.reported += self.holding[device]
        self.holding[device] = []
        self._idle.add(device)
        return self._wake()

    def lost(self, device: int) -> list[DeviceWork]:
        """Note that a device is gone, with everything it has not sent. ``DeviceLost``: it was the last one."""
        if device not in self._alive:
            return []
        self._alive.remove(device)
        self._idle.discard(device)
        self.lost_devices.append(device)
        self._queue.extend(self.holding.pop(device))
        if not self._alive and not self.done:
            raise DeviceLost(f"device {device} was the last one; {self._cohort - len(self.reported)} clients are left")
        return self._wake()

    def _check(self, device: int) -> None:
        if device not in self._alive:
            raise DeviceLost(f"device {device} was declared lost; its result is not used")

    def _next(self, device: int) -> DeviceWork:
        if not self._queue:
            return DeviceWork(device, (), True)
        client = self._queue.popleft()
        self.holding[device].append(client)
        return DeviceWork(device, (client,), False)

    def _wake(self) -> list[DeviceWork]:
        woken = sorted(self._idle)[: len(self._queue)]
        self._idle.difference_update(woken)
        return [self._next(device) for device in woken]


@dataclass(frozen=True)
class Outcome:
    seconds: float
    busy_seconds: tuple[float, ...]
    records: tuple[tuple[int, int, float], ...]


def drive(
    coordinator: Coordinator,
    devices: int,
    train: Train,
    *,
    on_report: Callable[[int], None] = lambda device: None,
    on_lost: Callable[[int, Sequence[int]], None] = lambda device, held: None,
    losses: Mapping[int, float] | None = None,
) -> Outcome:
    """Run a coordinator, not yet started, until it is done; ``losses``: device -> seconds until it is lost.

    ``on_lost`` is called with the clients whose sum the device holds.
    """
    time, busy = VirtualTime(), [0.0] * devices
    records: list[tuple[int, int, float]] = []

    def later(seconds: float, turn: int, device: int, then: Callable[[], object]) -> None:
        time.at(seconds, lambda: device in coordinator.lost_devices or then(), turn)

    def hand_out(works: Sequence[DeviceWork]) -> None:
        for work in works:
            later(time.now, _WORK if work.clients else _FREE, work.device, partial(do, work))

    def do(work: DeviceWork) -> None:
        end = time.now
        for client, following in zip(work.clients, (*work.clients[1:], None)):
            seconds = train(work.device, client, following)
            records.append((work.device, client, seconds))
            end += seconds
        busy[work.device] += end - time.now
        later(end, _FREE, work.device, partial(free, work))

    def free(work: DeviceWork) -> None:
        if work.ends:
            on_report(work.device)
            hand_out(coordinator.result(work.device))
        else:
            hand_out([coordinator.ask(work.device)])

    def lose(device: int) -> None:
        on_lost(device, tuple(coordinator.holding.get(device, ())))
        hand_out(coordinator.lost(device))

    for device, after in (losses or {}).items():
        later(after, _LOST, device, partial(lose, device))
    hand_out(coordinator.start())
    while not coordinator.done:
        time.step()
    return Outcome(time.now, tuple(busy), tuple(records))
