"""Argument checks of the planning functions, with uniform messages, and the hash of what they return."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Price = Callable[[int], float]
"""Elements (or kept elements) -> seconds."""


class Hashed:
    """Plain data that is compared between machines."""

    def to_json(self) -> str:
        raise NotImplementedError

    @property
    def hash(self) -> str:
        """Short digest, the same on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()


def check_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes as plain integers; raise ``ValueError`` if one is not a whole number or is negative."""
    checked = []
    for i, size in enumerate(sizes):
        try:
            whole = operator.index(size)
        except TypeError:
            raise ValueError(f"sizes[{i}] must be a whole number of elements, not {size!r}") from None
        if whole < 0:
            raise ValueError(f"sizes[{i}] must not be negative, got {whole}")
        checked.append(whole)
    return checked


def check_seconds(seconds: Sequence[float], count: int, name: str = "backward_seconds") -> list[float]:
    """Return the times as floats, one per tensor; raise ``ValueError`` if one is negative or not finite."""
    if len(seconds) != count:
        raise ValueError(f"{name} has {len(seconds)} entries where sizes has {count}")
    for i, value in enumerate(seconds):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}[{i}] must be finite and not negative, got {value}")
    return [float(value) for value in seconds]


def check_number(name: str, value: float, least: float = 0.0) -> float:
    """Return the number if it is finite and at least ``least``; otherwise raise ``ValueError``."""
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, not {value}")
    return value


def priced(name: str, price: Price, size: int) -> float:
    """Return the seconds that ``price`` gives for one size, checked."""
    seconds = price(size)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}({size}) must be finite and not negative, got {seconds}")
    return float(seconds)


def priced_row(name: str, price: Price, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return the seconds that ``price`` gives for many sizes: called once per size, checked together."""
    row = np.array([price(size) for size in sizes], dtype=np.float64)
    bad = ~(np.isfinite(row) & (row >= 0))
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"{name}({sizes[i]}) must be finite and not negative, got {row[i]}")
    return row


def check_breaks(breaks: Collection[int], count: int) -> list[int]:
    """Return the indices that must open a group, in ascending order."""
    for position in breaks:
        if not 0 <= position < count:
            raise ValueError(f"breaks: {position} is out of range for {count} tensors")
    return sorted(set(breaks))


def check_groups(groups: Sequence[Sequence[int]], count: int) -> None:
    """Raise unless the groups are consecutive, in order, not empty and cover every index once."""
    following = 0
    for g, group in enumerate(groups):
        if not group:
            raise ValueError(f"groups[{g}] is empty")
        for index in group:
            if index != following:
                raise ValueError(f"groups[{g}] holds {index} where {following} was expected")
            following += 1
    if following != count:
        raise ValueError(f"groups cover {following} tensors, but sizes has {count}")
