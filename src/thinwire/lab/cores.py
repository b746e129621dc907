"""Which of this machine's cores an emulated node has: machines of their own never take one another's."""

from __future__ import annotations

import os
from collections.abc import Sequence


def own_cores(node: int, nodes: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of a node: as many for each, in a row; where there are more nodes than cores, one, shared in turn."""
    each = len(cores) // nodes
    return tuple(cores[node * each : (node + 1) * each]) if each else (cores[node % len(cores)],)


def usable_cores() -> list[int]:
    """Those that this process may use, in order; empty where a system does not tell or tie."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
