"""How many cores this process may use, and whether the ranks' threads have any to spare."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the scheduler may give to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spare_cores(ranks: int) -> bool:
    """Whether the communicator threads of so many ranks on this machine have cores of their own."""
    return usable_cores() >= 2 * ranks
