"""Loaders over the folder of JPEG files: decoded in every epoch, or once into memory that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pictures import Augment, Decode, Folder, Uncached
from thinwire.data import CachedDataset, CacheStats
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass(frozen=True)
class Input:
    """Where samples come from.

    Attributes:
        name: of the row.
        directory: of the arena; None: no cache.
        memory_bytes: of the arena.
    """

    name: str
    directory: Path | None = None
    memory_bytes: int = 64 << 20


class Feed:
    """A rank's loader over one input, at one size. Feeds of other sizes find the same arena.

    Args:
        source: the files.
        given: where samples come from.
        stored: size that is decoded to.
        size: that the network sees.
        batch: samples per step, over all ranks.
    """

    def __init__(self, source: Folder, given: Input, *, stored: int, size: int, batch: int) -> None:
        prefix, suffix = Decode(stored), Augment(size)
        self.data: Any = Uncached(source, prefix, suffix)
        if given.directory is not None:
            self.data = CachedDataset(
                source, prefix, suffix, dataset_id=given.name, version=1, stored_size=stored,
                memory_bytes=given.memory_bytes, directory=given.directory,
            )  # fmt: skip
        ranks = dist.get_world_size()
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            self.data, ranks, dist.get_rank(), seed=0, drop_last=True
        )
        self._loader: DataLoader[Any] | None = DataLoader(
            self.data, batch // ranks, sampler=self.sampler, num_workers=1, persistent_workers=True, drop_last=True,
            multiprocessing_context="fork",
        )  # fmt: skip

    def epoch(self, number: int) -> DataLoader[Any]:
        """The loader, in that epoch's order and with its augmentations."""
        assert self._loader is not None, "this feed is closed"
        self.sampler.set_epoch(number)
        self.data.set_epoch(number)
        return self._loader

    def stats(self) -> CacheStats:
        """Of the cache, all ranks together; zeros where there is none."""
        return self.data.stats() if isinstance(self.data, CachedDataset) else CacheStats()

    def cached_share(self) -> float:
        """Of the samples, now."""
        return self.data.cached_share if isinstance(self.data, CachedDataset) else 0.0

    def close(self) -> None:
        """End the worker and give the memory back."""
        self._loader = None
        if isinstance(self.data, CachedDataset):
            self.data.close()
