"""Content keys: a stored sample is found again only while everything it was made from is unchanged.

An index alone would silently serve stale samples after a file, the prefix or the version changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from thinwire.systems.data.values import leaves, pack

KEY_BYTES = 16
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=KEY_BYTES).digest()


def prefix_id_of(prefix: object, given: str | None = None) -> str:
    if given is not None:
        return given
    text = repr(prefix)
    if _ADDRESS.search(text):
        raise ValueError(
            f"the prefix has no stable name ({text}): give prefix_id=, and change it whenever the prefix changes"
        )
    return text


@dataclass(frozen=True)
class Identity:
    """What all samples of a cache have in common: data, prefix, the size to which it resizes, the stored dtypes."""

    dataset_id: str
    version: str
    prefix_id: str
    stored_size: tuple[int, ...] | None = None
    dtypes: str = ""

    def name(self, *words: object) -> str:
        return "thinwire-" + digest("arena", asdict(self), *words).hex()

    def value_key(self, sample: object, fingerprint: object) -> bytes:
        return digest("value", asdict(self), sample, fingerprint)

    def raw_key(self, sample: object, fingerprint: object) -> bytes:
        return digest("raw", self.dataset_id, self.version, sample, fingerprint)


def fingerprint_of(source: Any, index: int) -> Any:
    """Return what changes with a sample's content: ``source.fingerprint(index)``, else (size, mtime_ns) of its file.

    Files are found as torchvision lists them, with the path first in ``source.samples[index]``; else None.
    """
    if hasattr(source, "fingerprint"):
        return source.fingerprint(index)
    samples = getattr(source, "samples", None)
    if isinstance(samples, (list, tuple)) and isinstance(samples[index], (list, tuple)):
        path = samples[index][0]
        if isinstance(path, (str, os.PathLike)) and os.path.exists(path):
            status = os.stat(path)
            return [status.st_size, status.st_mtime_ns]
    return None


class Keys:
    """The keys of a source's samples, remembered by this process unless ``verify`` is "always"."""

    def __init__(self, source: Any, identity: Identity, samples: int, verify: str) -> None:
        self.source, self.identity, self.samples, self.verify = source, identity, samples, verify
        self._forget()

    def _forget(self) -> None:
        self._keys = np.zeros((self.samples, 2, KEY_BYTES), dtype=np.uint8)  # memory is allocated on first touch
        self._known = np.zeros(self.samples, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_keys", "_known")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def of(self, index: int) -> tuple[bytes, bytes]:  # of the value, of the raw sample
        if self._known[index] and self.verify == "first":
            value, raw = self._keys[index]
            return value.tobytes(), raw.tobytes()
        fingerprint = fingerprint_of(self.source, index)
        pair = self.identity.value_key(index, fingerprint), self.identity.raw_key(index, fingerprint)
        self._keys[index] = np.frombuffer(b"".join(pair), dtype=np.uint8).reshape(2, KEY_BYTES)
        self._known[index] = True
        return pair


def check_prefix(source: Any, prefix: Callable[[Any], Any], indices: Sequence[int]) -> str:
    """Run the prefix twice on a few samples, under different seeds of torch, numpy and random, which are restored.

    Returns the dtypes of the first value, and torch's default dtype: part of the keys.
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
            each = [str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves(value)]
            kinds = f"{torch.get_default_dtype()}: {' '.join(each)}"
    return kinds


def check_source(source: Any, disk: object) -> None:
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
