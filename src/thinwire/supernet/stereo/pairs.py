"""Pairs of views with their disparity: a batch of them, in which order training takes them, padding."""

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
    """Views ``[B, 3, H, W]``, normalised, and the disparity ``[B, H, W]`` of the left one in pixels.

    A disparity that is 0, infinite or NaN is not known.
    """

    left: Tensor
    right: Tensor
    disparity: Tensor


class Pairs(Protocol):
    """A set of pairs: sample i is (left ``[3, H, W]``, right, disparity ``[H, W]``), always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor, Tensor]: ...


def normalise(image: Tensor) -> Tensor:
    """Colours in 0..1, ``[..., 3, H, W]``, to mean 0 and deviation 1 as of ImageNet."""
    mean, std = (torch.tensor(v, dtype=image.dtype, device=image.device).view(3, 1, 1) for v in (MEAN, STD))
    return (image - mean) / std


def collate(pairs: Pairs, indices: Sequence[int]) -> StereoBatch:
    """These samples as one batch."""
    left, right, disparity = zip(*(pairs[i] for i in indices))
    return StereoBatch(torch.stack(left), torch.stack(right), torch.stack(disparity))


def batches(pairs: Pairs, size: int, rank: int = 0, world: int = 1) -> Iterator[StereoBatch]:
    """The whole set in order, cut into batches, of which rank r takes r, r + world, ..."""
    for number, start in enumerate(range(0, len(pairs), size)):
        if number % world == rank:
            yield collate(pairs, range(start, min(start + size, len(pairs))))


def digest(*parts: object) -> int:
    """A number that follows from these values, the same on every machine: a seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Shuffled:
    """Which samples a rank takes at a step: consecutive ones of a permutation that is new in every epoch.

    It follows from the arguments alone, so that a resumed run goes on where it was. The ranks' batches of one step are,
    together, the batch that one rank would take if its batch were as large.

    Args:
        length: of the set. seed: of the permutations.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the set of pairs is empty")
        self._length, self._seed = length, seed
        self._epoch, self._order = -1, [0]

    def indices(self, step: int, batch: int, rank: int = 0, world: int = 1) -> list[int]:
        """Samples of a rank at a step; ``batch`` is that of one rank."""
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
    """Pad ``[..., H, W]`` at the top and the right, up to multiples; cut back with ``[..., -H:, :W]``."""
    height, width = image.shape[-2:]
    return F.pad(image, (0, -width % multiple, -height % multiple, 0), value=value)
