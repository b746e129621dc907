"""Cost aggregation: six modules that mix each scale's volume with itself, then with those of the other scales.

Follows AANet (Xu and Zhang, arXiv 2004.09548), as EASNet does. For fewer scales, the terms of the missing scales are
left out of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.systems.supernet.stereo.deform import DeformConv

SLOPE = 0.2  # of LeakyReLU


class Bottleneck(nn.Module):
    """Within one scale: 1x1, 3x3 (deformable or not), 1x1, with a shortcut."""

    def __init__(self, width: int, deformable: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = DeformConv(width) if deformable else nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[B, D, H, W]`` -> the same shape."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(x + self.norm3(self.conv3(y)))


def _link(source: int, target: int, widths: Sequence[int]) -> nn.Module:
    """Return the link between two scales: 1x1 to a finer one (the caller upsamples), strided 3x3 to a coarser one."""
    if source > target:
        return nn.Sequential(nn.Conv2d(widths[source], widths[target], 1, bias=False), nn.BatchNorm2d(widths[target]))
    layers: list[nn.Module] = []
    for step in range(target - source):
        last = step == target - source - 1
        out = widths[target] if last else widths[source]
        layers += [nn.Conv2d(widths[source], out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)]
        if not last:
            layers.append(nn.LeakyReLU(SLOPE))
    return nn.Sequential(*layers)


class Module(nn.Module):
    """One module: a bottleneck per scale, then every scale receives from every other."""

    def __init__(self, widths: Sequence[int], deformable: bool) -> None:
        super().__init__()
        scales = range(len(widths))
        self.branches = nn.ModuleList([Bottleneck(width, deformable) for width in widths])
        self.links = nn.ModuleDict({f"{j}to{i}": _link(j, i, widths) for i in scales for j in scales if i != j})

    def forward(self, volumes: list[Tensor]) -> list[Tensor]:
        """Process the given scales, the finest first; there may be fewer than ``widths``."""
        inner = [branch(x) for branch, x in zip(self.branches, volumes)]
        return [F.leaky_relu(self._sum(i, inner), SLOPE) for i in range(len(inner))]

    def _sum(self, i: int, inner: list[Tensor]) -> Tensor:
        total = inner[i]
        for j, x in enumerate(inner):
            if j != i:
                term = self.links[f"{j}to{i}"](x)
                if j > i:
                    term = F.interpolate(term, inner[i].shape[2:], mode="bilinear", align_corners=False)
                total = total + term
        return total


class Aggregation(nn.Module):
    """All modules and the final convolutions.

    Args:
        widths: number of disparity candidates at each scale, the finest first.
        modules: how many; the last ``deformable`` of them use deformable convolutions.
    """

    def __init__(self, widths: Sequence[int], modules: int, deformable: int) -> None:
        super().__init__()
        self.widths, self.deformable = tuple(widths), deformable
        self.stack = nn.ModuleList([Module(widths, k >= modules - deformable) for k in range(modules)])
        self.last = nn.ModuleList([nn.Conv2d(width, width, 1) for width in widths])

    def forward(self, volumes: list[Tensor]) -> list[Tensor]:
        """Compute volumes ``[B, D_s, H_s, W_s]`` of the first scales -> the same shapes."""
        for module in self.stack:
            volumes = module(volumes)
        return [last(x) for last, x in zip(self.last, volumes)]

    def fresh(self, scales: int) -> Aggregation:
        """Return a new one for the first scales, with its own weights; its parameter names are a subset of these."""
        return Aggregation(self.widths[:scales], len(self.stack), self.deformable)
