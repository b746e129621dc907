"""What a cache is worth: hit rates of the policies, and whether the input keeps up with the computation."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch

from thinwire.kernels.seeding import generator


def fill_once_hit_rate(cached: float) -> float:
    """Filled once, never evicted: from the second epoch on, in any order, the cached share itself."""
    return _share(cached)


def lru_hit_rate(cached: float, *, shuffled: bool = True) -> float:
    """Least recently used, one pass per epoch, in the limit of many samples.

    Shuffled afresh: between place x of one epoch and y of the next a sample sees 1 - x (1 - y) of the others, and is
    still there if that is below c; the probability of it is c + (1 - c) ln(1 - c). In a fixed order: 0 below c = 1.

    Example:
        >>> round(lru_hit_rate(0.5), 3), lru_hit_rate(0.5, shuffled=False)
        (0.153, 0.0)
    """
    c = _share(cached)
    if c == 1.0:
        return 1.0
    return c + (1 - c) * math.log1p(-c) if shuffled else 0.0


def simulate_lru(
    samples: int, capacity: int, epochs: int, *, dropped: int = 2, shuffled: bool = True, seed: int = 0
) -> float:
    """The hit rate of a real LRU list over epochs, the first ``dropped`` of them not counted.

    Args:
        samples: in the data set.
        capacity: samples that fit.
        epochs: all of them.
        dropped: from the beginning.
        shuffled: False: the same order in every epoch.
        seed: of the orders.
    """
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for epoch in range(epochs):
        order = torch.randperm(samples, generator=generator(seed, epoch if shuffled else 0)).tolist()
        for sample in order:
            if sample in held:
                held.move_to_end(sample)
                hits += epoch >= dropped
            else:
                held[sample] = None
                if len(held) > capacity:
                    held.popitem(last=False)
    return hits / (samples * (epochs - dropped))


@dataclass(frozen=True)
class InputCost:
    """What a node's input costs per sample, level by level.

    Attributes:
        decode_seconds: of the prefix, divided by the processes that decode at once.
        disk_bytes: read from local disk where that hits.
        disk_seconds_per_byte: of local disk.
        source_bytes: read from the source.
        source_seconds_per_byte: of the source, a network file system or object store.
    """

    decode_seconds: float
    disk_bytes: float = 0.0
    disk_seconds_per_byte: float = 0.0
    source_bytes: float = 0.0
    source_seconds_per_byte: float = 0.0

    def seconds(self, samples: int, memory_hits: float, disk_hits: float = 0.0) -> float:
        """Seconds for some samples: the slowest of decoding, disk and source, which work at the same time.

        Args:
            samples: of a batch, or of an epoch.
            memory_hits: share of the samples that come from memory.
            disk_hits: share of the others that come from disk.
        """
        missed = 1 - _share(memory_hits)
        return samples * max(
            self.decode_seconds * missed,
            self.disk_bytes * missed * _share(disk_hits) * self.disk_seconds_per_byte,
            self.source_bytes * missed * (1 - disk_hits) * self.source_seconds_per_byte,
        )

    def stall_seconds(self, samples: int, compute_seconds: float, memory_hits: float, disk_hits: float = 0.0) -> float:
        """Seconds that the computation waits, if the input works ahead."""
        return max(0.0, self.seconds(samples, memory_hits, disk_hits) - compute_seconds)


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not a share: it must be from 0 to 1")
    return float(value)
