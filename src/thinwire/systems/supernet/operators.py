"""Layers with variable kernel size and width: they hold the largest weights and compute with a part of them.

Method: Once-for-all (Cai et al., arXiv 1908.09791), as EASNet uses it. A smaller kernel is the centre of the next
larger one, transformed by a learned linear map; a narrower layer uses the first channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rect = tuple[slice, ...] | None
"""The part of a parameter that can have a gradient; None: no part."""


class ElasticBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the first c channels, if the input is ``[B, c, H, W]``."""

    def forward(self, input: Tensor) -> Tensor:
        c = input.shape[1]
        if self.momentum is None or self.running_mean is None or self.running_var is None or not self.affine:
            raise ValueError(
                "an ElasticBatchNorm needs a momentum (None would average over batches that not all channels have "
                f"seen), affine=True and track_running_stats=True: {self}"
            )
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            input, self.running_mean[:c], self.running_var[:c], self.weight[:c], self.bias[:c],
            self.training, self.momentum, self.eps,
        )  # fmt: skip

    def cut(self, channels: int) -> nn.BatchNorm2d:
        """Return a plain BatchNorm for the first channels."""
        plain = nn.BatchNorm2d(channels, self.eps, self.momentum)
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            plain.weight.copy_(self.weight[:channels])
            plain.bias.copy_(self.bias[:channels])
            plain.running_mean.copy_(self.running_mean[:channels])  # type: ignore[union-attr]
            plain.running_var.copy_(self.running_var[:channels])  # type: ignore[union-attr]
        return plain.train(self.training)

    @staticmethod
    def rectangles(channels: int) -> Mapping[str, Rect]:
        """Return the used rectangle of each parameter."""
        return {"weight": (slice(0, channels),), "bias": (slice(0, channels),)}


class ElasticDepthwise(nn.Module):
    """A depthwise kernel ``[M, 1, K, K]`` whose centres can be used as smaller kernels, each through its own map.

    Args:
        channels: M. kernels: the sizes, ascending; the last is K.
    """

    def __init__(self, channels: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(channels, 1, kernels[-1], kernels[-1]))
        steps = pairwise(reversed(kernels))
        self.maps = nn.ParameterDict({f"{a}to{b}": nn.Parameter(torch.eye(b * b)) for a, b in steps})

    def kernel(self, size: int, channels: int) -> Tensor:
        """Return the weights of a smaller kernel: ``[channels, 1, size, size]``."""
        weight = self.weight[:channels]
        for larger, smaller in pairwise(reversed(self.kernels)):
            if larger == size:
                break
            flat = centre(weight, smaller).reshape(channels, smaller * smaller)
            weight = F.linear(flat, self.maps[f"{larger}to{smaller}"]).view(channels, 1, smaller, smaller)
        return weight

    def rectangles(self, size: int, channels: int) -> Mapping[str, Rect]:
        """Return the used rectangles; a kernel smaller than K uses the centre of the next size below K."""
        largest = self.kernels[-1]
        seen = largest if size == largest else self.kernels[-2]
        edge = (largest - seen) // 2
        inner = slice(edge, largest - edge)
        found: dict[str, Rect] = {"weight": (slice(0, channels), slice(0, 1), inner, inner)}
        for larger, smaller in pairwise(reversed(self.kernels)):
            whole = slice(0, smaller * smaller)
            found[f"maps.{larger}to{smaller}"] = (whole, whole) if size <= smaller else None
        return found


def centre(weight: Tensor, size: int) -> Tensor:
    """Return the centre ``[..., size, size]`` of a kernel."""
    edge = (weight.shape[-1] - size) // 2
    return weight[..., edge : edge + size, edge : edge + size]
