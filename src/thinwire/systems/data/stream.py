"""A cache for a source that can only be iterated: it saves decoding, not reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from thinwire.core.kernels.seeding import generator
from thinwire.systems.data.keys import Identity, prefix_id_of
from thinwire.systems.data.levels import Levels
from thinwire.systems.data.stats import CacheStats
from thinwire.systems.data.values import require_safetensors


class CachedStream(IterableDataset[Any]):
    """An iterable data set whose decoded samples stay in shared memory: see :class:`~thinwire.data.CachedDataset`.

    The source decides which samples come, in which order and to which worker; its samples must be raw (webdataset:
    without ``.decode()``). The prefix is not tested at construction, since that would consume the source.

    Args:
        source: yields raw samples, from the first at every ``iter``.
        prefix: raw sample -> value, without randomness.
        suffix: (value, torch.Generator) -> sample; the generator is seeded by (seed, epoch, key).
        key: raw sample -> its permanent name, a str or an int; for webdataset ``lambda s: s["__key__"]``.
        capacity: largest number of different samples; the table is made for them.
        dataset_id, version, memory_bytes, directory, prefix_id, stored_size, seed, check: as for ``CachedDataset``.
    """

    def __init__(
        self,
        source: Iterable[Any],
        prefix: Callable[[Any], Any],
        suffix: Callable[[Any, torch.Generator], Any] | None = None,
        *,
        key: Callable[[Any], str | int],
        dataset_id: str,
        version: str | int,
        capacity: int = 1 << 20,
        memory_bytes: int | str = "auto",
        directory: str | Path = "/dev/shm",
        prefix_id: str | None = None,
        stored_size: int | tuple[int, ...] | None = None,
        seed: int = 0,
        check: str = "first",
    ) -> None:
        require_safetensors()
        size = (stored_size,) if isinstance(stored_size, int) else stored_size
        self._identity = Identity(
            dataset_id, str(version), prefix_id_of(prefix, prefix_id), size, str(torch.get_default_dtype())
        )
        self.source, self.key, self.suffix, self.seed = source, key, suffix, seed
        name = self._identity.name("stream")
        self._levels = Levels.within(memory_bytes, directory, name, prefix, capacity=capacity, check=check)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        for raw in self.source:
            name = self.key(raw)
            value = self._levels.value(self._identity.value_key(name, None), b"", lambda raw=raw: raw)  # type: ignore[misc]
            yield value if self.suffix is None else self.suffix(value, generator(self.seed, int(self._epoch), name))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with new augmentations."""
        self._epoch.fill_(epoch)

    def stats(self) -> CacheStats:
        """Return the counters of all processes of this node, since the arena was created."""
        return self._levels.stats()

    def close(self, *, delete: bool = False) -> None:
        """Release the memory; ``delete``: also remove the arena."""
        self._levels.close(delete=delete)

    def __enter__(self) -> CachedStream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
