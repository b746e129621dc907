"""Simulated clocks: of emulated devices, and of the clients' own devices, from a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.records import UNREADABLE


@dataclass(frozen=True)
class Speed:
    """How fast a device trains and sends. Nothing sleeps: the numbers drive a simulated clock.

    Attributes:
        seconds_per_sample, seconds_per_client: of training.
        up_bits_per_second, down_bits_per_second: of its link; infinite: sending takes no time.
    """

    seconds_per_sample: float
    seconds_per_client: float = 0.0
    up_bits_per_second: float = math.inf
    down_bits_per_second: float = math.inf

    def __post_init__(self) -> None:
        times = (self.seconds_per_sample, self.seconds_per_client)
        rates = (self.up_bits_per_second, self.down_bits_per_second)
        if not all(math.isfinite(t) and t >= 0 for t in times) or not all(rate > 0 for rate in rates):
            raise ValueError(f"{self} must have seconds of at least 0 and bits per second above 0")

    def train_seconds(self, samples: int) -> float:
        """Return the training seconds for a client with that many samples."""
        return self.seconds_per_sample * samples + self.seconds_per_client


@dataclass(frozen=True)
class ClientTrace:
    """The devices that clients would run on: client c has device c modulo their number.

    Attributes:
        devices: measured or assumed speeds.
    """

    devices: tuple[Speed, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a trace needs at least one device")

    def round_seconds(self, clients: Iterable[tuple[int, int, int]], down_bytes: int) -> float:
        """Return when the last client of a cohort has sent its answer, if all work at the same time.

        Args:
            clients: (client, samples, bytes that it sends).
            down_bytes: bytes that each client receives first.
        """
        worst = 0.0
        for client, samples, up_bytes in clients:
            device = self.devices[client % len(self.devices)]
            moved = 8 * down_bytes / device.down_bits_per_second + 8 * up_bytes / device.up_bits_per_second
            worst = max(worst, moved + device.train_seconds(samples))
        return worst

    @classmethod
    def read(cls, path: str | Path) -> ClientTrace:
        """Read a JSON list of objects with the fields of :class:`Speed`.

        Raises:
            ValueError: the file holds something else.
        """
        return cls(tuple(read_speeds(path)))


def read_speeds(path: str | Path) -> Sequence[Speed]:
    """Read speeds from a JSON list of objects with the fields of :class:`Speed`.

    Raises:
        ValueError: the file is missing or holds something else.
    """
    try:
        rows: Any = json.loads(Path(path).read_text())
        speeds = [Speed(**row) for row in rows]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ValueError(
            f'{path} must hold a JSON list such as [{{"seconds_per_sample": 0.01, "up_bits_per_second": 1e7}}]: {error}'
        ) from error
    if not speeds:
        raise ValueError(f"{path} contains no device")
    return speeds
