"""Hit rates of cache policies."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from thinwire.core.checks import check_number
from thinwire.core.kernels.seeding import generator


def lru_hit_rate(cached: float, *, shuffled: bool = True) -> float:
    """Return the hit rate of least-recently-used, with one pass per epoch, in the limit of many samples.

    With a fresh shuffle, a sample at place x of one epoch and y of the next has seen 1 - x (1 - y) of the others in
    between, and is still cached if that is below c; the probability is c + (1 - c) ln(1 - c). In a fixed order it is 0
    below c = 1.

    Example:
        >>> round(lru_hit_rate(0.5), 3), lru_hit_rate(0.5, shuffled=False)
        (0.153, 0.0)
    """
    c = check_number("share", cached, least=0, most=1)
    if c == 1.0:
        return 1.0
    return c + (1 - c) * math.log1p(-c) if shuffled else 0.0


def simulate_lru(
    samples: int, capacity: int, epochs: int, *, dropped: int = 2, shuffled: bool = True, seed: int = 0
) -> float:
    """Return the hit rate of a real LRU list for ``capacity`` samples over epochs, the first ``dropped`` left out."""
    read = lru_cache(capacity)(lambda sample: sample)
    hits = []
    for epoch in range(epochs):
        for sample in torch.randperm(samples, generator=generator(seed, epoch if shuffled else 0)).tolist():
            read(sample)
        hits.append(read.cache_info().hits)
    return (hits[-1] - (hits[dropped - 1] if dropped else 0)) / (samples * (epochs - dropped))
