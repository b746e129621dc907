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

from thinwire.systems.supernet.space import round8

Rect = tuple[slice, ...] | None
"""The part of a parameter that can have a gradient; None: no part."""


@torch.no_grad()
def copy_part(whole: nn.Module, plain: nn.Module) -> None:
    """Copy the first entries along each dimension into a module with the same names and smaller tensors."""
    ours = whole.state_dict()
    for name, target in plain.state_dict().items():
        target.copy_(ours[name][tuple(slice(0, n) for n in target.shape)])


def rectangles_of(whole: nn.Module, plain: nn.Module) -> dict[str, Rect]:
    """Return of each parameter what ``copy_part`` copies; None if the smaller module does not have it."""
    shapes = {name: tuple(slice(0, n) for n in p.shape) for name, p in plain.named_parameters()}
    return {name: shapes.get(name) for name, _ in whole.named_parameters()}


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
        plain = nn.BatchNorm2d(channels, self.eps, self.momentum)
        copy_part(self, plain)
        return plain.train(self.training)


class ElasticDepthwise(nn.Module):
    """A depthwise kernel ``[M, 1, K, K]`` whose centres can be used as smaller kernels, each through its own map."""

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
            edge = (larger - smaller) // 2
            inner = weight[..., edge : larger - edge, edge : larger - edge]
            flat = inner.reshape(channels, smaller * smaller)
            weight = F.linear(flat, self.maps[f"{larger}to{smaller}"]).view(channels, 1, smaller, smaller)
        return weight

    def rectangles(self, size: int, channels: int) -> Mapping[str, Rect]:
        largest = self.kernels[-1]
        seen = largest if size == largest else self.kernels[-2]
        edge = (largest - seen) // 2
        inner = slice(edge, largest - edge)
        found: dict[str, Rect] = {"weight": (slice(0, channels), slice(0, 1), inner, inner)}
        for larger, smaller in pairwise(reversed(self.kernels)):
            whole = slice(0, smaller * smaller)
            found[f"maps.{larger}to{smaller}"] = (whole, whole) if size <= smaller else None
        return found


class SqueezeExcite(nn.Module):
    """Scale each channel by a factor between 0 and 1 that depends on the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, round8(channels // 4), 1)
        self.expand = nn.Conv2d(round8(channels // 4), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        c = x.shape[1]
        q = round8(c // 4)
        s = x.mean((2, 3), keepdim=True)
        s = F.relu(F.conv2d(s, self.reduce.weight[:q, :c], self.reduce.bias[:q]))  # type: ignore[index]
        s = F.conv2d(s, self.expand.weight[:c, :q], self.expand.bias[:c])  # type: ignore[index]
        return x * (F.relu6(s + 3) / 6)

    def cut(self, channels: int) -> SqueezeExcite:
        plain = SqueezeExcite(channels)
        copy_part(self, plain)
        return plain


class MBConv(nn.Module):
    """A plain block; the depthwise convolution has the stride."""

    def __init__(self, c_in: int, middle: int, c_out: int, kernel: int, stride: int, excite: bool) -> None:
        super().__init__()
        self.expand = nn.Conv2d(c_in, middle, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(middle)
        self.depthwise = nn.Conv2d(middle, middle, kernel, stride, kernel // 2, groups=middle, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.excite = SqueezeExcite(middle) if excite else None
        self.project = nn.Conv2d(middle, c_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(c_out)
        self.shortcut = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.norm1(self.expand(x)))
        y = F.relu(self.norm2(self.depthwise(y)))
        if self.excite is not None:
            y = self.excite(y)
        y = self.norm3(self.project(y))
        return x + y if self.shortcut else y


class ElasticMBConv(nn.Module):
    """A block with variable kernel size and width: the allowed values are ascending."""

    def __init__(
        self, c_in: int, c_out: int, kernels: tuple[int, ...], expands: tuple[int, ...], stride: int, excite: bool
    ) -> None:
        super().__init__()
        self.c_in, self.c_out, self.stride = c_in, c_out, stride
        middle = self.middle(expands[-1])
        self.expand = nn.Conv2d(c_in, middle, 1, bias=False)
        self.norm1 = ElasticBatchNorm(middle)
        self.depthwise = ElasticDepthwise(middle, kernels)
        self.norm2 = ElasticBatchNorm(middle)
        self.excite = SqueezeExcite(middle) if excite else None
        self.project = nn.Conv2d(middle, c_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(c_out)
        self.shortcut = stride == 1 and c_in == c_out

    def middle(self, expand: int) -> int:
        return round8(self.c_in * expand)

    def forward(self, x: Tensor, kernel: int, expand: int) -> Tensor:
        m = self.middle(expand)
        y: Tensor = F.relu(self.norm1(F.conv2d(x, self.expand.weight[:m])))
        weight = self.depthwise.kernel(kernel, m)
        y = F.relu(self.norm2(F.conv2d(y, weight, stride=self.stride, padding=kernel // 2, groups=m)))
        if self.excite is not None:
            y = self.excite(y)
        y = self.norm3(F.conv2d(y, self.project.weight[:, :m]))
        return x + y if self.shortcut else y

    @torch.no_grad()
    def extract(self, kernel: int, expand: int) -> MBConv:
        """Return a plain block that computes the same: kernel maps are applied, slices copied."""
        m = self.middle(expand)
        plain = MBConv(self.c_in, m, self.c_out, kernel, self.stride, excite=False)
        plain.expand.weight.copy_(self.expand.weight[:m])
        plain.norm1 = self.norm1.cut(m)
        plain.depthwise.weight.copy_(self.depthwise.kernel(kernel, m))
        plain.norm2 = self.norm2.cut(m)
        plain.excite = None if self.excite is None else self.excite.cut(m)
        plain.project.weight.copy_(self.project.weight[:, :m])
        plain.norm3.load_state_dict(self.norm3.state_dict())
        return plain

    def rectangles(self, kernel: int, expand: int) -> Mapping[str, Rect]:
        """Return for each parameter the rectangle to which a pass can give a gradient."""
        m = self.middle(expand)
        with torch.device("meta"):
            plain = MBConv(self.c_in, m, self.c_out, kernel, self.stride, self.excite is not None)
        inner = {f"depthwise.{name}": rect for name, rect in self.depthwise.rectangles(kernel, m).items()}
        return rectangles_of(self, plain) | inner
