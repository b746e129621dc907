"""Pairs of views with their disparity: batches, the order in which training uses them, padding."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours


@dataclass(frozen=True)
class StereoBatch:
    """Views ``[B, 3, H, W]``, normalised, and the disparity ``[B, H, W]`` of the left view in pixels.

    A disparity of 0, infinity or NaN is unknown.
    """

    left: Tensor
    right: Tensor
    disparity: Tensor


class Pairs(Protocol):
    """A set of pairs: sample i is (left ``[3, H, W]``, right, disparity ``[H, W]``), always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor, Tensor]: ...


def normalise(image: Tensor) -> Tensor:
    """Normalise colours in 0..1, ``[..., 3, H, W]``, with ImageNet's mean and standard deviation."""
    mean, std = (torch.tensor(v, dtype=image.dtype, device=image.device).view(3, 1, 1) for v in (MEAN, STD))
    return (image - mean) / std


def collate(pairs: Pairs, indices: Sequence[int]) -> StereoBatch:
    """Return these samples as one batch."""
    left, right, disparity = zip(*(pairs[i] for i in indices))
    return StereoBatch(torch.stack(left), torch.stack(right), torch.stack(disparity))


def batches(pairs: Pairs, size: int, rank: int = 0, world: int = 1) -> Iterator[StereoBatch]:
    """Yield the whole set in order, cut into batches; rank r gets batches r, r + world, ..."""
    for number, start in enumerate(range(0, len(pairs), size)):
        if number % world == rank:
            yield collate(pairs, range(start, min(start + size, len(pairs))))


def digest(*parts: object) -> int:
    """Return a number derived from these values, the same on every machine: a seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Shuffled:
    """Which samples a rank uses at a step: consecutive entries of a permutation that is new in every epoch.

    It depends only on the arguments, so a resumed run continues where it was. Together, the ranks' batches of one step
    are the batch that a single rank would use if its batch were as large.

    Args:
        length: of the set. seed: for the permutations.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the set of pairs is empty")
        self._length, self._seed = length, seed
        self._epoch, self._order = -1, [0]

    def indices(self, step: int, batch: int, rank: int = 0, world: int = 1) -> list[int]:
        """Return a rank's samples at a step; ``batch`` is the size of one rank's batch."""
        start = (step * world + rank) * batch
        return [self._at(place) for place in range(start, start + batch)]

    def _at(self, place: int) -> int:
        epoch, rest = divmod(place, self._length)
        if epoch != self._epoch:
            order = list(range(self._length))
            random.Random(digest("order", self._seed, epoch)).shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order[rest]


def pad(image: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    """Pad ``[..., H, W]`` at the top and the right, up to multiples; undo with ``[..., -H:, :W]``."""
    height, width = image.shape[-2:]
    return F.pad(image, (0, -width % multiple, -height % multiple, 0), value=value)
