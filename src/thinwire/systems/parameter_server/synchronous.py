"""What a synchronous step takes on nodes of different speed, to compare asynchronous ones with."""

from __future__ import annotations

import random
from collections.abc import Callable

from thinwire.core.checks import check_number

BACKWARD_SHARE = 2 / 3
"""Share of a step that a good all-reduce can hide behind (assumed)."""


def hierarchical_seconds(model_bytes: float, nodes: int, bits_per_second: float, latency_seconds: float) -> float:
    """Return the time of a ring all-reduce over the nodes' network cards, without the work inside a node."""
    check_number("bits_per_second", bits_per_second, above=0)
    return 2 * (nodes - 1) * (model_bytes * 8 / nodes / bits_per_second + latency_seconds)


def synchronous_step_seconds(
    step_seconds: Callable[[int, int, int, random.Random], float], nodes: int, workers: int, exchange_seconds: float, *,
    draws: int = 200, seed: int = 0,
) -> float:  # fmt: skip
    """Return the mean time of a synchronous step: the slowest worker plus the exchange that nothing hides."""
    rng, total = random.Random(seed), 0.0
    for step in range(draws):
        slowest = max(step_seconds(node, worker, step, rng) for node in range(nodes) for worker in range(workers))
        total += slowest + max(0.0, exchange_seconds - BACKWARD_SHARE * slowest)
    return total / draws
