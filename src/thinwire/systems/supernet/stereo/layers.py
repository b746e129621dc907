"""The layers after the feature pyramid: correlation of the views, aggregation of the volumes, refinement.

Aggregation follows AANet (Xu and Zhang, arXiv 2004.09548), as EASNet does: modules that mix each scale's volume with
itself, then with those of the other scales; for fewer scales, the terms of the missing scales are left out of the sums.
Refinement follows StereoDRNet (Chabra et al., arXiv 1904.02251), through AANet: it uses how well the warped right image
matches the left one. Deformable convolutions: Deformable ConvNets v2 (Zhu et al., arXiv 1811.11168), in plain torch, so
that they run on every device and can be exported; with torchvision's kernel if it can be loaded.

Differences from the published code: the warp reads pixels exactly where the disparity says (the published warp
normalises by width - 1 and samples without aligned corners, so it is off by up to half a pixel at the border); the two
inputs of the refinement's trunk alternate channel by channel, so that its first channels contain both.

*Extension, off by default*: using only the first channels and the first blocks of the refinement.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.systems.supernet.operators import ElasticBatchNorm, Rect, copy_part, rectangles_of


def deform_conv2d(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Convolve ``[B, C, H, W]`` with ``[O, C, K, K]`` at stride 1, keeping the size; zeros outside the image.

    ``offset``: ``[B, G * 2 * K * K, H, W]``, for each of G groups of channels and each tap (down, right), in pixels;
    ``mask``: ``[B, G * K * K, H, W]``, the factor of each tap.
    """
    batch, channels, height, width = x.shape
    kernel = weight.shape[-1]
    taps = kernel * kernel
    groups = mask.shape[1] // taps
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    place = (torch.arange(kernel, **like) - (kernel - 1) / 2) * dilation
    down = place.repeat_interleave(kernel)[:, None, None] + torch.arange(height, **like)[:, None]
    right = place.repeat(kernel)[:, None, None] + torch.arange(width, **like)
    moved = offset.reshape(batch * groups, taps, 2, height, width)
    y, z = down + moved[:, :, 0], right + moved[:, :, 1]
    grid = torch.stack([(2 * z + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    image = x.reshape(batch * groups, channels // groups, height, width)
    seen = F.grid_sample(image, grid.view(batch * groups, taps * height, width, 2), align_corners=False)
    seen = seen.view(batch, groups, channels // groups, taps, height * width)
    seen = seen * mask.reshape(batch, groups, 1, taps, height * width)
    product = weight.view(weight.shape[0], -1) @ seen.reshape(batch, channels * taps, height * width)
    return product.view(batch, -1, height, width)


@functools.cache
def torchvision_kernel() -> Callable[..., Tensor] | None:
    """Return torchvision's kernel if it is installed and matches this torch; else None."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        found: Callable[..., Tensor] = importlib.import_module("torchvision.ops").deform_conv2d
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return found


class DeformConv(nn.Module):
    """3x3, two groups of taps, no bias; taps start at the positions of a dilated convolution, with factor 1."""

    groups = 2

    def __init__(self, channels: int, dilation: int = 2) -> None:
        super().__init__()
        self.dilation = dilation
        self.weight = nn.Parameter(torch.empty(channels, channels, 3, 3))
        self.offset = nn.Conv2d(channels, self.groups * 27, 3, padding=dilation, dilation=dilation, groups=self.groups)

    def forward(self, x: Tensor) -> Tensor:
        moved = self.offset(x)
        offset, mask = moved[:, : self.groups * 18], 2 * moved[:, self.groups * 18 :].sigmoid()
        kernel: Any = None if torch.compiler.is_exporting() else torchvision_kernel()
        if kernel is not None:
            done: Tensor = kernel(x, offset, self.weight, padding=self.dilation, dilation=self.dilation, mask=mask)
            return done
        return deform_conv2d(x, offset, mask, self.weight, self.dilation)


def correlation(left: Tensor, right: Tensor, disparities: int) -> Tensor:
    """Return the mean over channels of ``left[x] * right[x - d]`` for d from 0, ``[B, disparities, H, W]``."""
    width = left.shape[3]
    shifted = F.pad(right, (disparities - 1, 0))
    first = disparities - 1
    return torch.stack(
        [(left * shifted[..., first - d : first - d + width]).mean(1) for d in range(disparities)], dim=1
    )


def soft_argmax(volume: Tensor) -> Tensor:
    """Return the mean of d under the softmax over d, in pixels of this scale: ``[B, D, H, W]`` -> ``[B, H, W]``."""
    candidates = torch.arange(volume.shape[1], dtype=volume.dtype, device=volume.device)
    return (volume.softmax(1) * candidates[:, None, None]).sum(1)


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
        inner = [branch(x) for branch, x in zip(self.branches, volumes)]
        found = []
        for i, total in enumerate(inner):
            for j, x in enumerate(inner):
                if j != i:
                    term = self.links[f"{j}to{i}"](x)
                    if j > i:
                        term = F.interpolate(term, inner[i].shape[2:], mode="bilinear", align_corners=False)
                    total = total + term
            found.append(F.leaky_relu(total, SLOPE))
        return found


class Aggregation(nn.Module):
    """All modules, the last ones deformable; ``widths``: disparity candidates at each scale, the finest first."""

    def __init__(self, widths: Sequence[int], modules: int, deformable: int) -> None:
        super().__init__()
        self.widths, self.deformable = tuple(widths), deformable
        self.stack = nn.ModuleList([Module(widths, k >= modules - deformable) for k in range(modules)])
        self.last = nn.ModuleList([nn.Conv2d(width, width, 1) for width in widths])

    def forward(self, volumes: list[Tensor]) -> list[Tensor]:
        for module in self.stack:
            volumes = module(volumes)
        return [last(x) for last, x in zip(self.last, volumes)]

    def fresh(self, scales: int) -> Aggregation:
        """Return a new one for the first scales, with its own weights; its parameter names are a subset of these."""
        return Aggregation(self.widths[:scales], len(self.stack), self.deformable)

    def rectangles(self, scales: int) -> Mapping[str, Rect]:
        """Return each parameter whole, or None if that many scales do not use it."""
        with torch.device("meta"):
            return rectangles_of(self, self.fresh(scales))


def warp(image: Tensor, disparity: Tensor) -> Tensor:
    """Reconstruct the left view by looking up its pixels in the right one: ``image[x - d]``, linear between columns."""
    columns = torch.arange(image.shape[3], dtype=disparity.dtype, device=disparity.device)
    place = (columns - disparity).clamp(0, image.shape[3] - 1)
    first = place.detach().floor()
    part = (place - first).unsqueeze(1)
    left = first.long().unsqueeze(1).expand(-1, image.shape[1], -1, -1)
    right = (left + 1).clamp_max(image.shape[3] - 1)
    return image.gather(3, left) * (1 - part) + image.gather(3, right) * part


class Residual(nn.Module):
    """Two dilated 3x3 convolutions with a shortcut."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv1 = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm1 = ElasticBatchNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm2 = ElasticBatchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        w, d = x.shape[1], self.dilation
        y = F.leaky_relu(self.norm1(F.conv2d(x, self.conv1.weight[:w, :w], padding=d, dilation=d)), SLOPE)
        y = self.norm2(F.conv2d(y, self.conv2.weight[:w, :w], padding=d, dilation=d))
        return F.leaky_relu(x + y, SLOPE)


class Refinement(nn.Module):
    """Turn a disparity at one size into a better one at a larger size; ``width``: channels of the trunk, even."""

    def __init__(self, width: int = 32, dilations: Sequence[int] = (1, 2, 4, 8, 1, 1)) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"refine_width={width} must be even: half of it sees the images, half the disparity")
        self.width, self.dilations = width, tuple(dilations)
        self.images, self.images_norm = nn.Conv2d(6, width // 2, 3, padding=1, bias=False), ElasticBatchNorm(width // 2)
        self.estimate = nn.Conv2d(1, width // 2, 3, padding=1, bias=False)
        self.estimate_norm = ElasticBatchNorm(width // 2)
        self.blocks = nn.ModuleList([Residual(width, dilation) for dilation in dilations])
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, disparity: Tensor, left: Tensor, right: Tensor, cut: tuple[int, int] | None = None) -> Tensor:
        """Upsample the disparity ``[B, h, w]`` to the images' size, and correct it; ``cut``: (channels, blocks)."""
        width, depth = cut or (self.width, len(self.blocks))
        size = left.shape[2:]
        coarse = F.interpolate(disparity.unsqueeze(1), size, mode="bilinear", align_corners=False)
        coarse = coarse * (size[1] / disparity.shape[2])
        seen = torch.cat([warp(right, coarse.squeeze(1)) - left, left], dim=1)
        half = width // 2
        a = F.leaky_relu(self.images_norm(F.conv2d(seen, self.images.weight[:half], padding=1)), SLOPE)
        b = F.leaky_relu(self.estimate_norm(F.conv2d(coarse, self.estimate.weight[:half], padding=1)), SLOPE)
        x = torch.stack([a, b], dim=2).flatten(1, 2)
        for block in list(self.blocks)[:depth]:
            x = block(x)
        residual = F.conv2d(x, self.last.weight[:, :width], self.last.bias, padding=1)
        return F.relu(coarse + residual).squeeze(1)

    def rectangles(self, cut: tuple[int, int] | None) -> Mapping[str, Rect]:
        """Return for each parameter the rectangle to which a pass can give a gradient."""
        with torch.device("meta"):
            return rectangles_of(self, self._fresh(cut))

    def extract(self, cut: tuple[int, int] | None) -> Refinement:
        plain = self._fresh(cut)
        copy_part(self, plain)
        return plain

    def _fresh(self, cut: tuple[int, int] | None) -> Refinement:
        width, depth = cut or (self.width, len(self.blocks))
        return Refinement(width, self.dilations[:depth])
