"""What clients hold: the protocol, two ways to provide it, and batches in a seeded order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from thinwire.core.kernels.seeding import generator


@runtime_checkable
class ClientData(Protocol):
    """The population. Only ``load`` may read files; the other methods must be fast, even for a million clients."""

    def __len__(self) -> int:
        """Return the number of clients."""

    def samples(self, client: int) -> int:
        """Return how many samples a client has, at least 1."""

    def load(self, client: int) -> Any:
        """Return a client's samples: a tuple of tensors with equal first dimensions, or a map-style data set."""


class ArrayClients:
    """Clients that are parts of tensors in memory.

    Args:
        tensors: with equal first dimensions: inputs, labels.
        parts: for each client the indices of its samples, as returned by the functions of
            :mod:`~thinwire.federated.partition`.

    Raises:
        ValueError: a client has no samples, an index is out of range, or the tensors do not match.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[int] | np.ndarray[Any, Any]]) -> None:
        self.tensors = tuple(tensors)
        lengths = {len(x) for x in self.tensors}
        if len(lengths) != 1:
            raise ValueError(f"the tensors must have the same first dimension, not {sorted(lengths)}")
        size = lengths.pop()
        self.parts = [torch.as_tensor(np.asarray(part, dtype=np.int64)) for part in parts]
        for client, part in enumerate(self.parts):
            if part.numel() == 0:
                raise ValueError(
                    f"client {client} has no samples: leave it out, or use a larger least= in the partition"
                )
            if int(part.min()) < 0 or int(part.max()) >= size:
                raise ValueError(f"client {client} names samples outside 0..{size - 1}")

    def __len__(self) -> int:
        return len(self.parts)

    def samples(self, client: int) -> int:
        """Return how many samples a client has."""
        return self.parts[client].numel()

    def load(self, client: int) -> tuple[Tensor, ...]:
        part = self.parts[client]
        return tuple(x[part] for x in self.tensors)


class FunctionClients:
    """Clients whose samples a function makes or reads: any number of clients, none kept in memory.

    Args:
        count: number of clients.
        load: client -> its samples.
        samples: one number for all clients, or a function client -> number.
    """

    def __init__(self, count: int, load: Callable[[int], Any], samples: int | Callable[[int], int]) -> None:
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        self._count, self._load, self._samples = count, load, samples

    def __len__(self) -> int:
        return self._count

    def samples(self, client: int) -> int:
        """Return how many samples a client has."""
        return self._samples if isinstance(self._samples, int) else self._samples(client)

    def load(self, client: int) -> Any:
        return self._load(client)


def to_device(data: Any, device: torch.device) -> Any:
    """Move tensors to the device; return anything else unchanged."""
    if isinstance(data, (tuple, list)) and all(isinstance(x, Tensor) for x in data):
        return tuple(x.to(device) for x in data)
    return data


def size_of(data: Any) -> int:
    """Return how many samples there are in what ``load`` returned.

    Raises:
        TypeError, ValueError: batches cannot be made of it.
    """
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
    if not indexed or (isinstance(data, tuple) and not all(isinstance(x, Tensor) for x in data)):
        raise TypeError(
            f"load() returned a {type(data).__name__}: it must be a tuple of tensors with equal first dimensions, or a "
            "map-style data set"
        )
    if isinstance(data, tuple) and len({x.shape[:1] for x in data}) > 1:
        raise ValueError(f"load() returned tensors of {[tuple(x.shape) for x in data]}: their first dimensions differ")
    size = len(data[0]) if isinstance(data, tuple) and data else len(data)
    if not size:
        raise ValueError("load() returned no samples: leave such clients out")
    return size


def chosen_samples(data: Any, chosen: Tensor) -> Any:
    """Return some samples as a batch."""
    if isinstance(data, tuple):
        return tuple(x[chosen.to(x.device)] for x in data)
    return _collate(data, chosen.tolist())


def batches(data: Any, epochs: int, batch_size: int | None, limit: int | None, seed: int) -> Iterator[Any]:
    """Yield batches of a client's samples; see :meth:`~thinwire.federated.client.ClientContext.steps`."""
    tensors, size = isinstance(data, tuple), size_of(data)
    whole = batch_size is None or batch_size >= size
    draw = None if whole else generator(seed, "order")
    made = 0
    for _ in range(epochs):
        order = None if whole else torch.randperm(size, generator=draw)
        for start in range(0, size, size if whole else batch_size or size):
            if limit is not None and made >= limit:
                return
            made += 1
            if order is None:
                yield data if tensors else _collate(data, range(size))
                continue
            chosen = order[start : start + (batch_size or size)]
            yield chosen_samples(data, chosen)


def _collate(data: Any, indices: Sequence[int]) -> Any:
    from torch.utils.data import default_collate

    return default_collate([data[i] for i in indices])
