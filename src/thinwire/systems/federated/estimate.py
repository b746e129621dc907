"""How long a device takes for a client: a line fitted to earlier times, per device and kind of visit.

Parrot, arXiv 2303.01778: seconds = a n + b for a client of n samples. Differences from the paper's code: the window
counts rounds, not entries per client, so that old timings of rarely drawn clients are dropped; degenerate data give a
line too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

_LEAST_SLOPE = 1e-9


@dataclass(frozen=True)
class Fit:
    """Seconds = ``a`` times samples + ``b``."""

    a: float
    b: float

    def seconds(self, samples: int) -> float:
        """Return the seconds for a client with that many samples."""
        return self.a * samples + self.b


@dataclass(frozen=True)
class ClientTime:
    """How long one client took on one device."""

    device: int
    client: int
    samples: int
    seconds: float


def fit(samples: Iterable[int], seconds: Iterable[float]) -> Fit:
    """Fit by least squares, with bounds: the slope is positive and the intercept is not negative.

    If there is only one size, or the intercept would be negative, the line goes through the origin; if the slope would
    not be positive, the line is flat.

    Raises:
        ValueError: no data.
    """
    n, t = np.asarray(list(samples), dtype=np.float64), np.asarray(list(seconds), dtype=np.float64)
    if n.size == 0:
        raise ValueError("a line needs at least one record")
    proportional = Fit(max(float(t.sum() / n.sum()), _LEAST_SLOPE), 0.0)
    centred = n - n.mean()
    spread = float(centred @ centred)
    if spread == 0.0:
        return proportional
    a = float(centred @ (t - t.mean())) / spread
    b = float(t.mean() - a * n.mean())
    if a < _LEAST_SLOPE:  # time does not grow with size: use a constant time per client
        return Fit(_LEAST_SLOPE, max(float(t.mean()), 0.0))
    return Fit(a, b) if b >= 0 else proportional


class Estimates:
    """The fits of all devices.

    Args:
        window_rounds: how many past rounds' records count; None: all.
    """

    def __init__(self, window_rounds: int | None = 5) -> None:
        if window_rounds is not None and window_rounds < 1:
            raise ValueError(f"window_rounds={window_rounds} must be at least 1, or None for all rounds")
        self._window = window_rounds
        self._rounds: dict[str, deque[tuple[int, list[ClientTime]]]] = {}

    def add(self, round: int, visit: str, records: Iterable[ClientTime]) -> None:
        """Record the times of a round."""
        kept = self._rounds.setdefault(visit, deque())
        kept.append((round, list(records)))
        while self._window is not None and kept and kept[0][0] <= round - self._window:
            kept.popleft()

    def fits(self, visit: str, devices: int) -> list[Fit]:
        """Return a line per device; without records the others' mean; if nobody has any, 1 s per sample."""
        by_device: dict[int, list[ClientTime]] = {}
        for _, records in self._rounds.get(visit, ()):
            for record in records:
                by_device.setdefault(record.device, []).append(record)
        known: Mapping[int, Fit] = {
            device: fit((r.samples for r in records), (r.seconds for r in records))
            for device, records in by_device.items()
            if records
        }
        if not known:
            return [Fit(1.0, 0.0)] * devices
        mean = Fit(
            float(np.mean([f.a for f in known.values()])),
            float(np.mean([f.b for f in known.values()])),
        )
        return [known.get(device, mean) for device in range(devices)]
