"""Populations from files: text with one file per client, LEAF's JSON, and data sets of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.records import UNREADABLE
from thinwire.systems.federated.data import ArrayClients, FunctionClients
from thinwire.systems.federated.partition import by_key


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
        if length < 1 or (most is not None and most < 1):
            raise ValueError(f"length={length} and most={most} must be at least 1")
        self._length = length
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
        """Return the number of pieces of a client's file."""
        return self._counts[client]

    def load(self, client: int) -> tuple[Tensor, Tensor]:
        """Return bytes and next bytes, ``[samples, length]``, int64."""
        size = self._counts[client] * self._length
        with self.paths[client].open("rb") as file:
            text = torch.frombuffer(bytearray(file.read(size + 1)), dtype=torch.uint8).long()
        return text[:size].view(-1, self._length), text[1 : size + 1].view(-1, self._length)


def read_leaf(
    folder: str | Path, convert: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None
) -> tuple[ArrayClients, list[str]]:
    """Read a data set in LEAF's JSON: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

    Args:
        folder: with ``*.json`` files, such as LEAF's ``data/femnist/data/train``; or one file.
        convert: a user's x and y -> tensors; None: numbers become fp32 and classes int64.

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
                x, y = (_numbers if convert is None else convert)(row["x"], row["y"])
                if len(x) != len(y):
                    raise ValueError(f"user {user} has {len(x)} inputs and {len(y)} labels")
                inputs.append(x)
                labels.append(y)
                keys += [user] * len(y)
        except UNREADABLE as error:
            raise ValueError(f"{path} is not in LEAF's format: {error}") from error
    parts, users = by_key(keys)
    return ArrayClients((torch.cat(inputs), torch.cat(labels)), parts), users


def _numbers(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor(np.asarray(x, dtype=np.float32)), torch.tensor(np.asarray(y, dtype=np.int64))


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
