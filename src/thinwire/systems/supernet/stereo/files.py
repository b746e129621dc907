"""Pairs from a list of files, cropped and, for training, with changed colours."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from thinwire.systems.supernet.stereo.pairs import digest, normalise, pad
from thinwire.systems.supernet.stereo.readers import read_disparity, read_list, read_picture


class StereoFiles:
    """The pairs of a list. See :class:`~thinwire.supernet.stereo.pairs.Pairs`.

    Args:
        path: of the list, see :func:`~thinwire.supernet.stereo.readers.read_list`; every line needs a disparity.
        crop: (height, width) of a random window, always the same for a sample; None: the whole picture, padded at the
            top and right to ``multiple``.
        kind: of the disparities, see :func:`~thinwire.supernet.stereo.readers.read_disparity`.
        augment: change the colours of both views equally, and flip half of the samples upside down.
        seed: for crops and colours. multiple: for the padding.
    """

    def __init__(
        self,
        path: str | Path,
        crop: tuple[int, int] | None = None,
        kind: str = "",
        augment: bool = False,
        seed: int = 0,
        multiple: int = 24,
    ) -> None:
        self._files = read_list(path)
        if any(disparity is None for _, _, disparity in self._files):
            raise ValueError(f"{path} has lines without a disparity: training and evaluation need it")
        self._crop, self._kind, self._augment, self._seed, self._multiple = crop, kind, augment, seed, multiple

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        left_file, right_file, truth_file = self._files[index]
        assert truth_file is not None
        left, right, truth = read_picture(left_file), read_picture(right_file), read_disparity(truth_file, self._kind)
        if not left.shape[1:] == right.shape[1:] == truth.shape:
            raise ValueError(f"{left_file}: the views and the disparity differ in size")
        rng = random.Random(digest("files", self._seed, index))
        if self._augment:
            left, right = coloured(left, right, rng)
            if rng.random() < 0.5:
                left, right, truth = left.flip(1), right.flip(1), truth.flip(0)
        left, right = normalise(left), normalise(right)
        if self._crop is None:
            return pad(left, self._multiple), pad(right, self._multiple), pad(truth, self._multiple, torch.inf)
        height, width = self._crop
        if truth.shape[0] < height or truth.shape[1] < width:
            raise ValueError(f"{left_file} of {truth.shape[0]}x{truth.shape[1]} is smaller than the crop {self._crop}")
        top, start = rng.randint(0, truth.shape[0] - height), rng.randint(0, truth.shape[1] - width)
        window = (..., slice(top, top + height), slice(start, start + width))
        return left[window], right[window], truth[window]


def coloured(left: Tensor, right: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Return both views ``[3, H, W]`` in 0..1, each half the time with other contrast, gamma, brightness, saturation.

    The ranges are those of the published training; its change of hue is left out.
    """
    both = torch.stack([left, right])
    if rng.random() < 0.5:
        mean = both.mean((1, 2, 3), keepdim=True)
        both = (mean + rng.uniform(0.8, 1.2) * (both - mean)).clamp(0, 1)
    if rng.random() < 0.5:
        both = both ** rng.uniform(0.7, 1.5)
    if rng.random() < 0.5:
        both = (both * rng.uniform(0.5, 2.0)).clamp(0, 1)
    if rng.random() < 0.5:
        grey = both.mean(1, keepdim=True)
        both = (grey + rng.uniform(0.8, 1.2) * (both - grey)).clamp(0, 1)
    return both[0], both[1]
