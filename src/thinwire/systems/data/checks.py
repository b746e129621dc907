"""Checks of a source and a prefix before anything is cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.systems.data.values import leaves, pack


def check_prefix(source: Any, prefix: Callable[[Any], Any], indices: Sequence[int]) -> str:
    """Run the prefix twice on a few samples, under different seeds of torch, numpy and random.

    The three generators are restored afterwards.

    Returns:
        The dtypes of the first value, and torch's default dtype: part of the keys.

    Raises:
        ValueError: it returned two different values.
        TypeError: its values cannot be stored.
    """
    kinds = ""
    for index in indices:
        packed = []
        for seed in (1, 2):
            with _seeded(seed):
                value = prefix(source[index])
            packed.append(pack(value))
        if packed[0] != packed[1]:
            raise ValueError(
                f"the prefix is random: move it to suffix (two runs on sample {index} gave different values; the "
                "source's own transforms count too)"
            )
        if not kinds:
            kinds = f"{torch.get_default_dtype()}: {' '.join(_kind(leaf) for leaf in leaves(value))}"
    return kinds


def check_source(source: Any, disk: object) -> None:
    """Refuse sources that could lose data.

    Raises:
        TypeError: the source is not a map-style data set.
        ValueError: a StreamingDataset that may delete its only copy.
    """
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise TypeError(
            f"the source is a {type(source).__name__} without __getitem__ and __len__: use a map-style data set, or "
            "CachedDataset.stream(iterable, ...)"
        )
    if is_streaming(source):
        limit = getattr(source, "cache_limit", None)
        if limit is not None and any(getattr(stream, "remote", None) is None for stream in source.streams):
            raise ValueError(
                "this StreamingDataset has a cache_limit and no remote: it can delete the only copy of the data "
                "(mosaicml/streaming issue 988); leave cache_limit out"
            )
        if disk is not None:
            raise ValueError("a StreamingDataset already keeps local copies: leave disk= out")


def is_streaming(source: Any) -> bool:
    """Return whether it is a StreamingDataset of mosaicml-streaming, without importing that."""
    return any(
        base.__name__ == "StreamingDataset" and base.__module__.split(".")[0] == "streaming"
        for base in type(source).__mro__
    )


def samples_of(source: Any) -> int:
    """Return the number of samples of all ranks together: the length, except that a StreamingDataset's is per rank."""
    return int(source.num_samples) if is_streaming(source) else len(source)


def _kind(leaf: Any) -> str:
    return str(leaf.dtype) if isinstance(leaf, (Tensor, np.ndarray, np.generic)) else type(leaf).__name__


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
