"""Clocks: marks on a device's own timeline, and the median duration of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[], float]


class Stopwatch:
    """Marks moments in the order of a device's work: with CUDA events, or with a clock elsewhere.

    Args:
        device: where the work runs.
        clock: returns seconds; for devices without events, and for tests.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._events = device.type == "cuda" and clock is time.perf_counter

    def mark(self) -> Any:
        """Mark this moment without waiting for the device."""
        if not self._events:
            return self._clock()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def settle(self) -> None:
        """Wait until every mark can be read."""
        if self._events:
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to another, after ``settle``."""
        return float(start.elapsed_time(end) / 1e3 if self._events else end - start)


def settle(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    call: Callable[[], object],
    device: torch.device,
    *,
    seconds: float,
    least: int = 3,
    most: int = 15,
    queued: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the median duration of a call after one untimed call, repeated for about that many seconds.

    Args:
        call: what is timed.
        device: where it runs.
        seconds: time for all calls.
        least, most: bounds of how often it is timed.
        queued: calls that are timed together, without waiting for the device in between.
        clock: returns seconds.
    """
    call()
    settle(device)
    times: list[float] = []
    began = clock()
    while len(times) < least or (len(times) < most and clock() - began < seconds):
        start = clock()
        for _ in range(queued):
            call()
        settle(device)
        times.append((clock() - start) / queued)
    return statistics.median(times)
