"""Modulated deformable convolution: a 3x3 kernel whose taps are moved by amounts that depend on the input.

Paper: Deformable ConvNets v2 (Zhu et al., arXiv 1811.11168). In plain torch, so that it runs on every device and can be
exported; with torchvision's kernel if it can be loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def deform_conv2d(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Convolve with stride 1 and padding that keeps the size; zeros outside the image.

    Args:
        x: ``[B, C, H, W]``.
        offset: ``[B, G * 2 * K * K, H, W]``, for each of G groups of channels and each tap (down, right), in pixels.
        mask: ``[B, G * K * K, H, W]``, the factor of each tap.
        weight: ``[O, C, K, K]``. dilation: distance between taps.
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
        """Compute ``[B, C, H, W]`` -> the same shape."""
        moved = self.offset(x)
        offset, mask = moved[:, : self.groups * 18], 2 * moved[:, self.groups * 18 :].sigmoid()
        kernel: Any = None if torch.compiler.is_exporting() else torchvision_kernel()
        if kernel is not None:
            done: Tensor = kernel(x, offset, self.weight, padding=self.dilation, dilation=self.dilation, mask=mask)
            return done
        return deform_conv2d(x, offset, mask, self.weight, self.dilation)
