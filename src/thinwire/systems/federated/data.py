"""What clients hold: the protocol, ways to provide it, and batches in a seeded order."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.core.checks import check_count
from thinwire.core.kernels.seeding import generator, seed_of
from thinwire.core.records import UNREADABLE
from thinwire.systems.federated.partition import by_key
from thinwire.systems.federated.workspace import Evaluate

MEDIAN, WORST = "median client", "worst tenth"


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
                raise ValueError(f"client {client} has no samples: leave it out, or partition with a larger least=")
            if int(part.min()) < 0 or int(part.max()) >= size:
                raise ValueError(f"client {client} names samples outside 0..{size - 1}")

    def __len__(self) -> int:
        return len(self.parts)

    def samples(self, client: int) -> int:
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
        self._count, self._load, self._samples = check_count("count", operator.index(count)), load, samples

    def __len__(self) -> int:
        return self._count

    def samples(self, client: int) -> int:
        return self._samples if isinstance(self._samples, int) else self._samples(client)

    def load(self, client: int) -> Any:
        return self._load(client)


class TextClients:
    """Each file is a client; a sample is a piece of its bytes, with the piece shifted by one byte as the target.

    Args:
        paths: of the files; those shorter than one sample are left out.
        length: bytes of a sample.
        most: most samples of a client; None: no limit.

    Raises:
        ValueError: no file is long enough, or one cannot be read.
    """

    def __init__(self, paths: Sequence[str | Path], length: int = 64, most: int | None = None) -> None:
        self._length = check_count("length", length)
        if most is not None:
            check_count("most", most)
        found = []
        for path in map(Path, paths):
            try:
                count = (path.stat().st_size - 1) // length
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            if count >= 1:
                found.append((path, count if most is None else min(count, most)))
        if not found:
            raise ValueError(f"none of the {len(paths)} files holds more than {length} bytes")
        self.paths = [path for path, _ in found]
        self._counts = [count for _, count in found]

    def __len__(self) -> int:
        return len(self.paths)

    def samples(self, client: int) -> int:
        return self._counts[client]

    def load(self, client: int) -> tuple[Tensor, Tensor]:
        """Return bytes and next bytes, ``[samples, length]``, int64."""
        size = self._counts[client] * self._length
        with self.paths[client].open("rb") as file:
            text = torch.frombuffer(bytearray(file.read(size + 1)), dtype=torch.uint8).long()
        return text[:size].view(-1, self._length), text[1 : size + 1].view(-1, self._length)


def read_leaf(folder: str | Path) -> tuple[ArrayClients, list[str]]:
    """Read a data set in LEAF's JSON: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

    Numbers become fp32 and classes int64.

    Args:
        folder: with ``*.json`` files, such as LEAF's ``data/femnist/data/train``; or one file.

    Returns:
        The clients, and the users' names in the same order. Users without samples are left out.

    Raises:
        ValueError: there are no such files, or they have another form.
    """
    root = Path(folder)
    paths = [root] if root.is_file() else sorted(root.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} contains no .json files in LEAF's format")
    inputs, labels, keys = [], [], []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            rows = [(user, content["user_data"][user]) for user in content["users"]]
            for user, row in rows:
                if not row["y"]:
                    continue
                x, y = (torch.tensor(np.asarray(row[k], d)) for k, d in (("x", np.float32), ("y", np.int64)))
                if len(x) != len(y):
                    raise ValueError(f"user {user} has {len(x)} inputs and {len(y)} labels")
                inputs.append(x)
                labels.append(y)
                keys += [user] * len(y)
        except UNREADABLE as error:
            raise ValueError(f"{path} is not in LEAF's format: {error}") from error
    parts, users = by_key(keys)
    return ArrayClients((torch.cat(inputs), torch.cat(labels)), parts), users


def read_hugging_face(
    dataset: Any, key: str, convert: Callable[[dict[str, Any]], tuple[Tensor, ...]]
) -> tuple[FunctionClients, list[Any]]:
    """Make clients from a Hugging Face data set, one for each value of a column. Rows are read when needed.

    Args:
        dataset: a ``datasets.Dataset``, or anything with ``dataset[column]`` and ``dataset[index]``.
        key: the column: ``"writer_id"``, ``"speaker_id"``.
        convert: a row -> tensors.

    Returns:
        The clients, and the values in the same order.

    Raises:
        ValueError: there is no such column.
    """
    columns = list(getattr(dataset, "column_names", []))
    if columns and key not in columns:
        raise ValueError(f"the data set has no column {key!r}; it has {', '.join(columns)}")
    parts, values = by_key(list(dataset[key]))

    def load(client: int) -> tuple[Tensor, ...]:
        rows = [convert(dataset[int(i)]) for i in parts[client]]
        return tuple(torch.stack(column) for column in zip(*rows))

    return FunctionClients(len(parts), load, lambda client: len(parts[client])), values


def client_seed(run: int, round: int, purpose: str, client: int) -> int:
    """Return the seed of one client's work: a function of these four, never of the devices."""
    return seed_of("federated", run, round, purpose, client)


def sample(run: int, round: int, population: int, clients_per_round: int) -> list[int]:
    """Return that many of ``population`` clients, uniform without replacement, ascending; the run's seed is ``run``."""
    return sorted(random.Random(client_seed(run, round, "cohort", 0)).sample(range(population), clients_per_round))


def over_clients(right: Callable[[nn.Module, Any], float], clients: ClientData, most: int = 1000) -> Evaluate:
    """Return an ``evaluate``: the median of the clients' accuracies, and the mean of the worst tenth.

    Args:
        right: (model in eval mode, a client's data) -> the share of correct answers, from 0 to 1.
        clients: data of each client, held out if available.
        most: how many clients are evaluated; of more, that many are drawn at random, always the same ones.
    """
    chosen = sample(0, 0, len(clients), min(check_count("most", most), len(clients)))

    def evaluate(model: nn.Module, round: int) -> Mapping[str, float]:
        device = next(model.parameters()).device
        shares = np.sort([float(right(model, to_device(clients.load(client), device))) for client in chosen])
        worst = shares[: -(-len(shares) // 10)]
        return {MEDIAN: float(np.median(shares)), WORST: float(worst.mean())}

    return evaluate


def to_device(data: Any, device: torch.device) -> Any:
    if isinstance(data, (tuple, list)) and all(isinstance(x, Tensor) for x in data):
        return tuple(x.to(device) for x in data)
    return data


def size_of(data: Any) -> int:
    """Return how many samples there are in what ``load`` returned; refuse what batches cannot be made of."""
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
    if isinstance(data, tuple):
        return tuple(x[chosen.to(x.device)] for x in data)
    from torch.utils.data import default_collate

    return default_collate([data[i] for i in chosen.tolist()])


def batches(data: Any, epochs: int, batch_size: int | None, limit: int | None, seed: int) -> Iterator[Any]:
    """Return batches of a client's samples; see :meth:`~thinwire.federated.ClientContext.steps`."""
    size = size_of(data)
    whole = batch_size is None or batch_size >= size
    draw = None if whole else generator(seed, "order")

    def every() -> Iterator[Any]:
        for _ in range(epochs):
            order = torch.arange(size) if whole else torch.randperm(size, generator=draw)
            for chosen in order.split(min(batch_size or size, size)):
                yield data if whole and isinstance(data, tuple) else chosen_samples(data, chosen)

    return islice(every(), limit)
