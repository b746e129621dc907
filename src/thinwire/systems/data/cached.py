"""``CachedDataset``: the deterministic part of the input pipeline once per node, the random part every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from thinwire.core.checks import check_choice
from thinwire.core.kernels.seeding import generator
from thinwire.systems.data.arena import CacheStats
from thinwire.systems.data.keys import Identity, Keys, check_prefix, check_source, prefix_id_of, samples_of
from thinwire.systems.data.levels import Levels
from thinwire.systems.data.values import require_safetensors

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

Suffix = Callable[[Any, torch.Generator], Any]


class _Cached:
    """What both kinds of data sets share: the levels below, the epoch, the suffix."""

    def __init__(self, source: Any, suffix: Suffix | None, seed: int) -> None:
        self.source, self.suffix, self.seed = source, suffix, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers must see changes
        self._levels: Levels

    def _sample(self, value: Any, name: str | int) -> Any:
        return value if self.suffix is None else self.suffix(value, generator(self.seed, self.epoch, name))

    @property
    def epoch(self) -> int:
        """The epoch last passed to :meth:`set_epoch`, in this process or in the one that created the data set."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with new augmentations. Call it before iterating; persistent workers see it too."""
        self._epoch.fill_(epoch)

    def stats(self) -> CacheStats:
        """Return the counters of all processes of this node since the arena was created; subtract two for an epoch."""
        return self._levels.arena.counters.total()

    def close(self, *, delete: bool = False) -> None:
        """Release this process's memory; ``delete``: also remove the arena, for all later processes."""
        self._levels.close(delete=delete)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _size(stored: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    return (stored,) if isinstance(stored, int) else stored


class CachedDataset(_Cached, Dataset[Any]):
    """A map-style data set whose decoded samples stay in memory shared by all processes of a machine.

    ``dataset[i]`` is ``suffix(prefix(source[i]), generator)``. The results of the prefix are kept, up to a budget, and
    never evicted: with a fresh shuffle per epoch, a cache that is filled once with a fraction c of the samples has a
    hit rate of c, and LRU only c + (1 - c) ln(1 - c). The suffix runs every time, with a generator seeded by (seed,
    epoch, i), so cached and uncached runs give the same bits.

    Works under DataLoader with fork, spawn and persistent workers, and under torchdata's StatefulDataLoader. The arena
    stays when the job ends, for the next one; ``close(delete=True)`` removes it.

    Method: the multi-level DataCache of Shi et al., arXiv 2010.10458.

    Differences from the paper:
        * Samples are found by their content, not by their index.
        * The node that keeps a sample is fixed: one seeded permutation, cut into blocks. With
          :class:`~thinwire.data.LocalitySampler` every node draws from its own block. Other nodes' memory is never
          read; a sample of another node's block comes from the source.
        * No eviction; this is documented and tested.

    Args:
        source: any map-style data set; also a StreamingDataset of mosaicml-streaming.
        prefix: raw sample -> value, without randomness. A value is made of dicts, tuples, tensors, arrays, bytes,
            numbers and text.
        suffix: (value, torch.Generator) -> sample. None: the value is the sample.
        dataset_id: names the data.
        version: version of the data; samples of another version are never used.
        memory_bytes: size of this machine's arena, tables included; "auto": half of the free memory.
        directory: folder of the arena, in memory.
        disk: a folder on local disk for raw samples, the second level; None: there is none.
        prefix_id: names the prefix; needed if its repr contains a memory address, as a function's does.
        stored_size: size to which the prefix resizes; part of the keys.
        seed: of the partition and of the suffix's generators.
        node, nodes: number of this process's machine, from 0, and of all that share the data.
        verify: "first": a changed file is noticed when a process first reads it; "always": at each access.
        check: "first": checksums are compared when a process first reads a value; "always": at each read.

    Raises:
        ValueError: a random prefix, a prefix without a stable name, a budget too large, or an option out of range.
        TypeError: a value that cannot be stored.
        FileNotFoundError, PermissionError: for ``directory``.
        ImportError: safetensors is not installed.
    """

    def __init__(
        self,
        source: Any,
        prefix: Callable[[Any], Any],
        suffix: Suffix | None = None,
        *,
        dataset_id: str,
        version: str | int,
        memory_bytes: int | str = "auto",
        directory: str | Path = "/dev/shm",
        disk: str | Path | None = None,
        prefix_id: str | None = None,
        stored_size: int | tuple[int, ...] | None = None,
        seed: int = 0,
        node: int = 0,
        nodes: int = 1,
        verify: str = "first",
        check: str = "first",
    ) -> None:
        require_safetensors()
        check_source(source, disk)
        self.samples = samples_of(source)
        if nodes < 1 or not 0 <= node < nodes:
            raise ValueError(f"node={node} of nodes={nodes}: nodes must be at least 1 and node from 0 to nodes - 1")
        if nodes > max(1, self.samples):
            raise ValueError(f"nodes={nodes} is more than the {self.samples} samples: some nodes would have none")
        check_choice("verify", verify, ("first", "always"))
        super().__init__(source, suffix, seed)
        self.node, self.nodes = node, nodes
        name = prefix_id_of(prefix, prefix_id)
        few = sorted({0, self.samples // 2, self.samples - 1}) if self.samples else []
        kinds = check_prefix(source, prefix, few)
        identity = Identity(dataset_id, str(version), name, _size(stored_size), kinds)
        self._keys = Keys(source, identity, self.samples, verify)
        self._foreign: Tensor | None = None  # samples that other nodes keep
        if nodes > 1:
            self._foreign = torch.ones(self.samples, dtype=torch.bool)
            self._foreign[self.block] = False
        name = identity.name(*((seed, node, nodes) if nodes > 1 else ()))
        capacity = self.samples // nodes + 1
        self._levels = Levels(prefix, memory_bytes, directory, name, capacity=capacity, check=check, disk=disk)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        i = int(index)
        if not -self.samples <= i < self.samples:
            raise IndexError(f"sample {i} of {self.samples}")
        i %= self.samples
        key, raw_key = self._keys.of(i)
        ours = self._foreign is None or not bool(self._foreign[i])
        value = self._levels.value(key, raw_key, lambda: self.source[i], store=ours)
        return self._sample(value, i)

    @property
    def block(self) -> Tensor:
        """The samples that this node keeps, int64: its part of one permutation that is the same on all nodes."""
        order = torch.randperm(self.samples, generator=generator(self.seed, "partition"))
        return order[self.samples * self.node // self.nodes : self.samples * (self.node + 1) // self.nodes]

    @property
    def cached_share(self) -> float:
        """Fraction of this node's samples that are in memory: the hit rate of an epoch over them."""
        return self._levels.arena.held() / max(1, self.samples if self._foreign is None else len(self.block))

    @staticmethod
    def stream(
        source: Iterable[Any], prefix: Callable[[Any], Any], suffix: Suffix | None = None, **options: Any
    ) -> Any:
        """Return the same for a source that can only be iterated, such as webdataset: see :class:`CachedStream`."""
        return CachedStream(source, prefix, suffix, **options)


class CachedStream(_Cached, IterableDataset[Any]):
    """An iterable data set whose decoded samples stay in shared memory: see :class:`~thinwire.data.CachedDataset`.

    The source decides which samples come, in which order and to which worker; its samples must be raw (webdataset:
    without ``.decode()``). The prefix is not tested at construction, since that would consume the source.

    Args:
        source: yields raw samples, from the first at every ``iter``.
        prefix, suffix: as for ``CachedDataset``; the suffix's generator is seeded by (seed, epoch, key).
        key: raw sample -> its permanent name, a str or an int; for webdataset ``lambda s: s["__key__"]``.
        capacity: largest number of different samples; the table is made for them.
        dataset_id, version, memory_bytes, directory, prefix_id, stored_size, seed, check: as for ``CachedDataset``.
    """

    def __init__(
        self,
        source: Iterable[Any],
        prefix: Callable[[Any], Any],
        suffix: Suffix | None = None,
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
        name, kinds = prefix_id_of(prefix, prefix_id), str(torch.get_default_dtype())
        self._identity = Identity(dataset_id, str(version), name, _size(stored_size), kinds)
        super().__init__(source, suffix, seed)
        self.key = key
        name = self._identity.name("stream")
        self._levels = Levels(prefix, memory_bytes, directory, name, capacity=capacity, check=check)

    def __iter__(self) -> Iterator[Any]:
        for raw in self.source:
            name = self.key(raw)
            value = self._levels.value(self._identity.value_key(name, None), b"", lambda raw=raw: raw)  # type: ignore[misc]
            yield self._sample(value, name)
