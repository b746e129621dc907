"""Cached, partitioned input: decoded samples in memory shared by a node's processes, and the order to read them in.

Decoders, downloaders and loaders do not belong here (see torch, torchdata, mosaicml-streaming, webdataset).
"""

from thinwire.systems.data import stall
from thinwire.systems.data.arena import CacheStats
from thinwire.systems.data.cached import CachedDataset
from thinwire.systems.data.resolution import ResolutionSchedule, Stage
from thinwire.systems.data.sampler import LocalitySampler, Prefetched

__all__ = [
    "CacheStats",
    "CachedDataset",
    "LocalitySampler",
    "Prefetched",
    "ResolutionSchedule",
    "Stage",
    "stall",
]
