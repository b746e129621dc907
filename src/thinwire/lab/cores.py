"""The cores of an emulated node: like separate machines, nodes do not use each other's cores."""

from __future__ import annotations

import os
from collections.abc import Sequence


def own_cores(node: int, nodes: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return a node's cores: equally many in a row for each; with more nodes than cores, one each, shared in turn."""
    each = len(cores) // nodes
    return tuple(cores[node * each : (node + 1) * each]) if each else (cores[node % len(cores)],)


def usable_cores() -> list[int]:
    """Return the cores that this process may use, in order; empty if the system does not report or pin them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
