"""How many cores this process may use, and whether the threads of all ranks on a machine have spare cores."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
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
    """Return whether the ranks that really share this rank's cores, on whatever node, have spare cores for threads.

    Args:
        places: every rank's ``place()``.
        rank: the rank that asks.
    """
    rows = [json.loads(text) for text in places]
    machine, mine = rows[rank]
    together = [set(cores) for name, cores in rows if name == machine and not set(cores).isdisjoint(mine)]
    return len(set.union(*together)) >= 2 * len(together)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
