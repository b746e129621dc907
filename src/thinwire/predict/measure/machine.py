"""This machine: the cores that this process may use, and whether its load disturbed a measurement (Linux only)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine


def usable_cores() -> int:
    """Return the number of cores that the scheduler may give to this process."""
    return len(_cores())


def spare_cores(ranks: int) -> bool:
    """Return whether the communicator threads of that many ranks on this machine have cores of their own."""
    return spare_places([place()] * ranks, 0)


def place() -> bytes:
    """Identify the machine of this process and the cores that it may use, for :func:`spare_places`."""
    machine = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    return json.dumps([machine, _cores()]).encode()


def spare_places(places: Sequence[bytes], rank: int) -> bool:
    """Return whether the ranks that really share this rank's cores, on whatever node, have spare cores for threads."""
    rows = [json.loads(text) for text in places]
    machine, mine = rows[rank]
    together = [set(cores) for name, cores in rows if name == machine and not set(cores).isdisjoint(mine)]
    return len(set.union(*together)) >= 2 * len(together)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_BUSY = 0.75  # of the cores: other processes that run or wait for a core
_STOLEN = 0.02  # of the CPU's time
_THROTTLED = 0.05  # of the periods


@dataclass(frozen=True)
class Load:
    """The machine's load during a measurement: mean runnable processes over a minute before, and after (with ours).

    ``stolen``: share of the CPU's time that the host of a virtual machine gave to others. ``throttled``, ``periods``:
    in how many of the control group's periods its CPU share was used up.
    """

    cores: int
    before: float
    after: float
    stolen: float
    throttled: int
    periods: int

    def sentence(self, own: int = 0) -> str:
        """Return one line if the figures are not to be trusted, else ""; ``own``: number of measured processes."""
        said = []
        if self.before > _BUSY * self.cores:
            said.append(f"load average {self.before:.1f} on {_counted(self.cores)} before the start")
        elif self.after > own + _BUSY * self.cores:
            said.append(f"load average {self.after:.1f} on {_counted(self.cores)} at the end, {own} of it our own")
        if self.stolen > _STOLEN:
            said.append(f"{self.stolen:.0%} of the CPU's time went to other guests of its host")
        if self.throttled > _THROTTLED * self.periods:
            said.append(f"held back by its control group in {self.throttled} of {self.periods} periods")
        return f"this machine is overloaded: {'; '.join(said)}: figures are too high and scattered" if said else ""


class LoadSample:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._average()
        self._cpu, self._group = self._cpu_times(), self._throttling()

    def load(self) -> Load | None:
        """Return the load since creation; None if the system does not report it."""
        after = self._average()
        if self._before is None or after is None:
            return None
        (stolen, whole), (throttled, periods) = (
            (new[0] - old[0], new[1] - old[1])
            for new, old in ((self._cpu_times(), self._cpu), (self._throttling(), self._group))
        )
        return Load(os.cpu_count() or 1, self._before, after, stolen / whole if whole else 0.0, throttled, periods)

    def _average(self) -> float | None:
        words = self._words("proc/loadavg")
        return float(words[0]) if words else None

    def _cpu_times(self) -> tuple[int, int]:
        ticks = [int(word) for word in self._words("proc/stat")[1:9]]  # of all cores: the first line
        return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)

    def _throttling(self) -> tuple[int, int]:
        for place in ("sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"):
            words = self._words(place)
            found = dict(zip(words[::2], words[1::2]))
            if "nr_throttled" in found:
                return int(found["nr_throttled"]), int(found["nr_periods"])
        return 0, 0

    def _words(self, place: str) -> list[str]:
        try:
            return (self._root / place).read_text().split()
        except OSError:
            return []


def _counted(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
