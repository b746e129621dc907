"""Simulates devices under one clock: which is free when, given the seconds of each training. Only numbers, no tensors.

The in-process back end trains inside the function that gives the seconds; ``predict`` computes them by a formula.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.systems.federated.coordinator import Coordinator, DeviceWork

_LOST, _FREE, _WORK = 0, 1, 2  # at equal times the loss of a device comes first

Train = Callable[[int, int, "int | None"], float]
"""(device, client, next client, both as indices into the cohort) -> seconds."""


@dataclass(frozen=True)
class Outcome:
    """The result of a visit.

    Attributes:
        seconds: when the last sum arrived.
        busy_seconds: per device.
        records: (device, client, seconds) of all trainings, including lost ones.
    """

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
    """Run a coordinator until it is done.

    Args:
        coordinator: not yet started.
        devices: how many, numbered from 0.
        train: called once for every client that a device starts.
        on_report: called when a device's sum has arrived.
        on_lost: called when a device is lost, with the clients whose sum it holds.
        losses: device -> seconds after which it is lost.

    Raises:
        DeviceLost: no device is left.
    """
    events: list[tuple[float, int, int, int, DeviceWork | None]] = []
    order = itertools.count()
    busy = [0.0] * devices
    records: list[tuple[int, int, float]] = []

    def push(now: float, kind: int, device: int, work: DeviceWork | None) -> None:
        heapq.heappush(events, (now, kind, next(order), device, work))

    for device, after in (losses or {}).items():
        push(after, _LOST, device, None)
    for work in coordinator.start():
        push(0.0, _WORK, work.device, work)
    now = 0.0
    while not coordinator.done:
        now, kind, _, device, found = heapq.heappop(events)
        if device in coordinator.lost_devices:
            continue
        new: list[DeviceWork] = []
        if kind == _LOST:
            on_lost(device, coordinator.holders().get(device, ()))
            new = coordinator.lost(device)
        elif found is not None and kind == _WORK:
            end = now
            for place, client in enumerate(found.clients):
                following = found.clients[place + 1] if place + 1 < len(found.clients) else None
                seconds = train(device, client, following)
                records.append((device, client, seconds))
                end += seconds
            busy[device] += end - now
            push(end, _FREE, device, found)
        elif found is not None and found.ends:
            on_report(device)
            new = coordinator.result(device)
        else:
            more = coordinator.ask(device)
            push(now, _WORK if more.clients else _FREE, device, more)
        for work in new:
            push(now, _WORK, work.device, work)
    return Outcome(now, tuple(busy), tuple(records))
