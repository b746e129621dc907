"""A user's DataLoader as the data of a workload: every rank's batches of each step, and the loss of a batch."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from thinwire.tools.bench.models.workload import Loss

BatchLoss = Callable[[nn.Module, Any], Tensor]
HELD_OUT_BATCHES = 16
"""That a rank looks at, at most, each time a loss on held-out data is wanted."""

_KEPT = ("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
         "generator", "prefetch_factor")  # fmt: skip
_AHEAD = 64  # index lists that are drawn at once, as saving the generators' states costs some 0.1 ms
_END = object()
_BY_HAND = "return a function (model, batch) -> loss as well"


def check_data(name: str, data: Any) -> None:
    """Raise ``ValueError`` for what gives no batches, or only once."""
    wanted = "a DataLoader, a list of batches, or a function (rank, workers) that makes one"
    if isinstance(data, (Tensor, str, Mapping, Dataset)) or not isinstance(data, Iterable):
        raise ValueError(f"model {name!r}: its data must be {wanted}, not {type(data).__name__}")
    if isinstance(data, Iterator):
        raise ValueError(f"model {name!r}: its data can be read only once, as a generator; it must be {wanted}")
    sized: Any = data
    with suppress(TypeError):  # a stream has no length
        if len(sized) == 0:
            raise _empty(name)


@dataclass
class Feed:
    """Every rank's batches: its own ones of each step, epoch after epoch; the same step and rank give the same batch.

    Ranks take turns on the batches of a loader, in an order on which all agree, also if it shuffles. They do not where
    its sampler is distributed already, nor where ``data`` is a function, which is asked for each rank's own data.
    ``workers`` None: as many as the process group has.
    """

    name: str
    data: Any
    workers: int | None = None
    streams: dict[int, tuple[int, Iterator[Any]]] = field(default_factory=dict)

    def batch(self, step: int, rank: int) -> Any:
        at, stream = self.streams.get(rank, (-1, iter(())))
        with _drawn(step, rank):
            if at != step:
                stream = self._share(rank, self.size, step)
            found = next(stream)
        self.streams[rank] = step + 1, stream
        return found

    def held_out(self, rank: int, workers: int) -> Iterator[Any]:
        """Yield the first batches of a rank's part of one epoch."""
        with _drawn(0, rank):
            stream = self._share(rank, workers, epochs=1)
        for step in range(HELD_OUT_BATCHES):
            with _drawn(step, rank):
                found = next(stream, _END)
            if found is _END:
                return
            yield found

    @property
    def size(self) -> int:
        return self.workers or (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)

    def _share(self, rank: int, workers: int, step: int = 0, epochs: int | None = None) -> Iterator[Any]:
        data = self._made(rank, workers)
        first, stride, salt = rank, workers, 0
        if callable(self.data) or any(getattr(part, "num_replicas", 1) == workers > 1 for part in _parts(data)):
            first, stride, salt = 0, 1, rank
        elif rank >= workers:  # without a process group nobody knows of how many ranks this is one
            stride, salt = 1, rank

        def mine(source: Callable[[], Any], ahead: int) -> Iterator[Any]:
            return islice(self._epochs(source, data, salt, epochs, ahead), first + step * stride, None, stride)

        if not _reads_by_index(data):
            return mine(lambda: self._made(rank, workers) if isinstance(data, Iterator) else data, 1)
        options = {name: getattr(data, name) for name in _KEPT}
        lists: Any = mine(lambda: data.batch_sampler, _AHEAD)  # others' samples are not read
        return iter(DataLoader(batch_sampler=lists, **options))

    def _made(self, rank: int, workers: int) -> Any:
        if not callable(self.data):
            return self.data
        with _drawn(0):  # a random split is the same on all ranks
            made = self.data(rank, workers)
        if not isinstance(made, Iterator):
            check_data(self.name, made)
        return made

    def _epochs(self, source: Callable[[], Any], data: Any, salt: int, epochs: int | None, ahead: int) -> Iterator[Any]:
        for epoch in count() if epochs is None else range(epochs):
            for part in _parts(data):
                if (draws := getattr(part, "generator", None)) is not None:
                    draws.manual_seed(_seed(epoch, salt))
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            with _drawn(epoch, salt):
                items = iter(source())
            for place in count():
                with _drawn(epoch, place, salt):
                    found = list(islice(items, ahead))
                if not found:
                    break
                yield from found
            if not place:
                raise _empty(self.name)


def losses(name: str, data: Any, loss: BatchLoss | None, workers: int | None = None) -> tuple[Loss, Loss]:
    """Return the loss of a step's batch, and of the data as held-out data."""
    feed, of_batch = Feed(name, data, workers), loss or _from_output

    def of(model: nn.Module, batch: Any) -> Tensor:
        found = of_batch(model, _moved(batch, next(model.parameters()).device))
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            where = f"the model's output is no loss but {what}: {_BY_HAND}"
            raise ValueError(where if loss is None else f"the loss must be a tensor of one number, not {what}")
        return found

    def trained(model: nn.Module, step: int, rank: int) -> Tensor:
        return of(model, feed.batch(step, rank))

    def held_out(model: nn.Module, step: int, rank: int) -> Tensor:
        for share in ((rank, feed.size), (0, 1)):  # all of it, if there are fewer batches than ranks
            if found := [of(model, batch).detach().reshape(()) for batch in feed.held_out(*share)]:
                break
        return torch.stack(found).mean()

    return trained, held_out


def _from_output(model: nn.Module, batch: Any) -> Any:
    options = dict(batch) if isinstance(batch, Mapping) else {}
    parts = [] if options else batch if isinstance(batch, (tuple, list)) else [batch]
    try:
        inspect.signature(model.forward).bind(*parts, **options)
    except TypeError as error:
        raise ValueError(f"the model cannot be called with a batch, {error}: {_BY_HAND}") from error
    output = model(*parts, **options)
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


def _moved(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):  # tensors, and batches of libraries
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_moved(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _parts(data: Any) -> list[Any]:
    """Return what of a loader may draw, or know of epochs and ranks."""
    batches = getattr(data, "batch_sampler", None)
    return [data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None)]


def _reads_by_index(data: Any) -> bool:
    own = not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__
    return not own and data.batch_sampler is not None and not isinstance(data.dataset, IterableDataset)


def _empty(name: str) -> ValueError:
    return ValueError(f"model {name!r}: its data gives not a single batch")


def _seed(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


@contextmanager
def _drawn(*numbers: int) -> Iterator[None]:
    """Seed what a loader draws, such as its order or an augmentation, and leave the model's generators as they were."""
    import numpy

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(_seed(*numbers))  # not those of GPUs, where only models draw
    random.seed(_seed(*numbers))
    numpy.random.seed(_seed(*numbers))
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
