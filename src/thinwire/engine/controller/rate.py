"""How fast the ranks average, from one short exchange: enough to cut plain averages into buckets."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.collectives.lanes import Lane
from thinwire.engine.ranks.agreement import gather_bytes

_FIRST_BYTES, _MORE_BYTES = 256 << 10, 4 << 20
_SHORT_SECONDS = 0.05


def all_reduce_rate(lane: Lane, device: torch.device) -> Callable[[float], float]:
    """Measure; all ranks call it and get the same. Returns the seconds of an all-reduce of that many bytes.

    A message short enough for a slow network first; where that takes next to nothing, a longer one that a token bucket
    or a start-up does not hide.
    """
    _slowest(_FIRST_BYTES, lane, device)  # connections, buffers
    size, seconds = _FIRST_BYTES, _slowest(_FIRST_BYTES, lane, device)
    if seconds < _SHORT_SECONDS:
        size, seconds = _MORE_BYTES, min(_slowest(_MORE_BYTES, lane, device) for _ in range(2))
    return lambda total: seconds / size * total


def _slowest(size: int, lane: Lane, device: torch.device) -> float:
    x = torch.zeros(size // 4, device=device)
    dist.barrier(lane.group)
    start = time.perf_counter()
    dist.all_reduce(x, group=lane.group)
    took = repr(time.perf_counter() - start).encode()
    return max(float(row) for row in gather_bytes(took, lane, device))
