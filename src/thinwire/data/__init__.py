"""Cached, partitioned input: decoded samples in memory shared by a node's processes, and the order to read them in.

Decoders, downloaders and loaders do not belong here (see torch, torchdata, mosaicml-streaming, webdataset).
"""

from thinwire.data import policy, stall
from thinwire.data.cached import CachedDataset
from thinwire.data.prefetch import Prefetched
from thinwire.data.resolution import ResolutionSchedule, Stage
from thinwire.data.sampler import LocalitySampler
from thinwire.data.stats import CacheStats

__all__ = [
    "CacheStats",
    "CachedDataset",
    "LocalitySampler",
    "Prefetched",
    "ResolutionSchedule",
    "Stage",
    "policy",
    "stall",
]
