"""Refine a disparity at a larger size, using how well the warped right image matches the left one.

Follows StereoDRNet (Chabra et al., arXiv 1904.02251), as EASNet does through AANet.

Differences from the published code: the warp reads pixels exactly where the disparity says (the published warp
normalises by width - 1 and samples without aligned corners, so it is off by up to half a pixel at the border); the two
inputs of the trunk alternate channel by channel, so that its first channels contain both.

*Extension, off by default*: using only the first channels and the first blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.systems.supernet.operators import ElasticBatchNorm, Rect
from thinwire.systems.supernet.stereo.aggregation import SLOPE


def warp(image: Tensor, disparity: Tensor) -> Tensor:
    """Reconstruct the left view by looking up its pixels in the right one.

    Args:
        image: right, ``[B, C, H, W]``.
        disparity: of the left view, ``[B, H, W]``, in pixels; positions beyond the border read the border.

    Returns:
        ``[B, C, H, W]``: ``image[x - d]``, linear between columns; integer disparities are exact.
    """
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
        """Compute ``[B, w, H, W]`` -> the same shape, with the weights of the first w channels."""
        w, d = x.shape[1], self.dilation
        y = F.leaky_relu(self.norm1(F.conv2d(x, self.conv1.weight[:w, :w], padding=d, dilation=d)), SLOPE)
        y = self.norm2(F.conv2d(y, self.conv2.weight[:w, :w], padding=d, dilation=d))
        return F.leaky_relu(x + y, SLOPE)


class Refinement(nn.Module):
    """Turn a disparity at one size into a better one at a larger size.

    Args:
        width: channels of the trunk, even. dilations: one per block.
    """

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
        """Upsample the disparity and correct it.

        Args:
            disparity: ``[B, h, w]``, in pixels of its own size.
            left, right: images ``[B, 3, H, W]`` of the wanted size.
            cut: (channels, blocks) to use; None: all.

        Returns:
            ``[B, H, W]``, in pixels of the wanted size.
        """
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
        width, depth = cut or (self.width, len(self.blocks))
        w, half, three = slice(0, width), slice(0, width // 2), slice(0, 3)
        found: dict[str, Rect] = {
            "images.weight": (half, slice(0, 6), three, three),
            "estimate.weight": (half, slice(0, 1), three, three),
            "last.weight": (slice(0, 1), w, three, three),
            "last.bias": (slice(0, 1),),
        }
        for name in ("images_norm", "estimate_norm"):
            found |= {f"{name}.{key}": rect for key, rect in ElasticBatchNorm.rectangles(width // 2).items()}
        for k in range(len(self.blocks)):
            rects: Mapping[str, Rect] = ElasticBatchNorm.rectangles(width)
            for i in (1, 2):
                found[f"blocks.{k}.conv{i}.weight"] = (w, w, three, three) if k < depth else None
                found |= {f"blocks.{k}.norm{i}.{key}": rect if k < depth else None for key, rect in rects.items()}
        return found

    @torch.no_grad()
    def extract(self, cut: tuple[int, int] | None) -> Refinement:
        """Return a plain copy of the first channels and blocks."""
        width, depth = cut or (self.width, len(self.blocks))
        plain = Refinement(width, self.dilations[:depth])
        ours = self.state_dict()
        for name, target in plain.state_dict().items():
            target.copy_(ours[name][tuple(slice(0, n) for n in target.shape)])
        return plain
