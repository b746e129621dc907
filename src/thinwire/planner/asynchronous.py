"""What asynchronous schemes and synchronous all-reduces send per gradient, and how long a synchronous step takes."""

from __future__ import annotations

import random
from collections.abc import Callable

from thinwire.planner.checks import check_number

CONTROL_BYTES = 128
"""Of a control message."""

BACKWARD_SHARE = 2 / 3
"""Of a step: what a good all-reduce can hide behind (assumed)."""


def asp_bytes(model_bytes: float, shards: int = 0) -> float:
    """Up and down per gradient where each goes to the server alone and is answered with the weights.

    Args:
        shards: of the model, each with a frame for its piece; over all links.

    Example:
        >>> asp_bytes(4e6)
        8000256.0
    """
    return 2 * model_bytes + 2 * CONTROL_BYTES * (1 + shards)


def pulled_bytes(model_bytes: float, gradients_per_pull: float, shards: int = 0) -> float:
    """Up and down per gradient where a leader sums that many before the server pulls and answers.

    Args:
        shards: of the model, each with a frame for its piece; over all links.

    Example:
        >>> pulled_bytes(4e6, 4)
        2000224.0
    """
    m = check_number("gradients_per_pull", gradients_per_pull, 1.0)
    return 2 * model_bytes / m + CONTROL_BYTES * (1 + (3 + 2 * shards) / m)


def server_gradients_per_second(
    model_bytes: float, bits_per_second: float, gradients_per_pull: float = 1.0, shards: int = 0
) -> float:
    """Most gradients per second that the server's link lets through, or k shards' links, a slice of the model each.

    Example:
        >>> [server_gradients_per_second(4e6, 1e9, shards=k) for k in (0, 2)]
        [31.25, 62.5]
    """
    m = check_number("gradients_per_pull", gradients_per_pull, 1.0)
    return max(shards, 1) * m * check_number("bits_per_second", bits_per_second) / (8 * model_bytes)


def hierarchical_bytes(model_bytes: float, nodes: int, workers: int) -> float:
    """Sent and received per gradient by all cards together, of a ring over nodes after a sum inside each.

    Example:
        >>> hierarchical_bytes(4e6, 4, 4)  # a little less than pulled_bytes(4e6, 4), over all cards
        1500000.0
    """
    return 2 * model_bytes * (nodes - 1) / (nodes * workers)


def hierarchical_seconds(model_bytes: float, nodes: int, bits_per_second: float, latency_seconds: float) -> float:
    """Duration of a ring all-reduce over the nodes' cards, without what happens inside a node."""
    check_number("bits_per_second", bits_per_second)
    return 2 * (nodes - 1) * (model_bytes * 8 / nodes / bits_per_second + latency_seconds)


def synchronous_step_seconds(
    step_seconds: Callable[[int, int, int, random.Random], float],
    nodes: int,
    workers: int,
    exchange_seconds: float,
    *,
    draws: int = 200,
    seed: int = 0,
) -> float:
    """Mean step of synchronous training: the slowest worker's, and what the exchange exceeds its backward by.

    Args:
        step_seconds: (node, worker, step, random) -> seconds.
        exchange_seconds: of the whole gradient.
        draws: steps to average over.
    """
    rng, total = random.Random(seed), 0.0
    for step in range(draws):
        slowest = max(step_seconds(node, worker, step, rng) for node in range(nodes) for worker in range(workers))
        total += slowest + max(0.0, exchange_seconds - BACKWARD_SHARE * slowest)
    return total / draws
