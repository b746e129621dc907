"""EASNet: a stereo network whose sub-networks can be trained, run and extracted.

Paper: Wang et al., EASNet: Searching Elastic and Accurate Network Architecture for Stereo Matching, ECCV 2022
(arXiv 2207.09796). Two views go through one feature pyramid; at every scale the features are correlated; the volumes
are aggregated; the finest disparity is refined twice.

Differences from the published code: the warp is corrected (:mod:`~thinwire.supernet.stereo.layers`); channels are
sorted over their whole range, not within segments (``segmented=True`` does that); offset convolutions start at zero; an
extracted network omits the final convolutions of scales that it does not have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.systems.supernet.active import ActiveSet
from thinwire.systems.supernet.operators import ElasticDepthwise, ElasticMBConv, Rect
from thinwire.systems.supernet.space import Space, SubNet, round8
from thinwire.systems.supernet.stereo.layers import Aggregation, DeformConv, Refinement, correlation, soft_argmax


@torch.no_grad()
def initialise(net: nn.Module) -> None:
    """Initialise convolutions as normal with variance 2 / (k * k * channels out); biases, offset convolutions as 0.

    The refinements' last convolutions are zero too: with their one output channel the variance would be 2 / 9, a noise
    that doubles the error after short training (tiny network, 300 steps: 1.41 px against 0.92).
    """
    for module in net.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Conv2d, DeformConv, ElasticDepthwise)) and isinstance(weight, Tensor):
            fan = weight.shape[0] * weight.shape[2] * weight.shape[3]
            weight.normal_(0.0, (2.0 / fan) ** 0.5)
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            module.bias.zero_()
    for module in net.modules():
        if isinstance(module, DeformConv):
            module.offset.weight.zero_()
        elif isinstance(module, Refinement):
            module.last.weight.zero_()


def order(importance: Tensor, edges: list[int]) -> Tensor:
    """Return indices by descending importance within each range between the edges; equal ones keep their order."""
    parts = []
    for start, end in zip([0, *edges], edges):
        parts.append(start + importance[start:end].argsort(descending=True, stable=True))
    return torch.cat(parts)


@torch.no_grad()
def sort_block(block: ElasticMBConv, expands: tuple[int, ...]) -> None:
    """Sort a block's middle channels, within the ratios' widths, by the L1 norm of the projection's columns."""
    edges = sorted({block.middle(e) for e in expands})
    index = order(block.project.weight.abs().sum((0, 2, 3)), edges)
    block.expand.weight.copy_(block.expand.weight[index])
    block.depthwise.weight.copy_(block.depthwise.weight[index])
    block.project.weight.copy_(block.project.weight[:, index])
    for norm in (block.norm1, block.norm2):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(tensor[index])
    if (excite := block.excite) is not None:
        reduce, expand = excite.reduce, excite.expand
        assert reduce.bias is not None
        assert expand.bias is not None
        expand.weight.copy_(expand.weight[index])
        expand.bias.copy_(expand.bias[index])
        inner = order(expand.weight.abs().sum((0, 2, 3)), sorted({round8(m // 4) for m in edges}))
        expand.weight.copy_(expand.weight[:, inner])
        reduce.weight.copy_(reduce.weight[:, index][inner])
        reduce.bias.copy_(reduce.bias[inner])


def estimate(
    left: Tensor,
    right: Tensor,
    pyramid: Callable[[Tensor], list[Tensor]],
    aggregation: Aggregation,
    refinement: Sequence[nn.Module],
    *options: Any,
) -> list[Tensor]:
    """Compute the disparities ``[B, h, w]``, each in its own pixels, coarse to fine; the last two are refined."""
    pairs = zip(pyramid(left), pyramid(right), aggregation.widths)
    volumes = [correlation(a, b, width) for a, b, width in pairs]
    found = [soft_argmax(volume) for volume in reversed(aggregation(volumes))]
    height, width = left.shape[2:]
    size = (height // 2, width // 2)
    half = [nn.functional.interpolate(x, size, mode="bilinear", align_corners=False) for x in (left, right)]
    for step, views in zip(refinement, (half, [left, right])):
        found.append(step(found[-1], *views, *options))
    return found


def check_size(left: Tensor, right: Tensor, multiple: int) -> None:
    """Raise ``ValueError``, naming the padding, unless the views match each other and the strides."""
    if left.ndim != 4 or left.shape != right.shape or left.shape[1] != 3:
        raise ValueError(f"the views must both be [B, 3, H, W], not {list(left.shape)} and {list(right.shape)}")
    height, width = left.shape[2:]
    if height % multiple or width % multiple:
        wanted = [-(-n // multiple) * multiple for n in (height, width)]
        raise ValueError(
            f"images of {height}x{width} do not divide by {multiple}: pad them to {wanted[0]}x{wanted[1]}, "
            "for example with thinwire.supernet.stereo.pad"
        )


class Stereo(nn.Module):
    """A network of one fixed size, as ``ElasticStereo.extract`` returns it."""

    def __init__(
        self, stages: Sequence[Sequence[nn.Module]], aggregation: Aggregation, refinement: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.features = nn.ModuleList([nn.Sequential(*stage) for stage in stages])
        self.aggregation = aggregation
        self.refinement = nn.ModuleList(refinement)
        self.multiple = 3 * 2 ** (len(self.features) - 1)

    def pyramid(self, x: Tensor) -> list[Tensor]:
        """Return one view's features, the finest first."""
        found = []
        for stage in self.features:
            x = stage(x)
            found.append(x)
        return found

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        """Compute views ``[B, 3, H, W]`` -> scales + 2 disparities, coarse to fine; the last is ``[B, H, W]``."""
        check_size(left, right, self.multiple)
        return estimate(left, right, self.pyramid, self.aggregation, list(self.refinement))


class ElasticStereo(nn.Module):
    """A network that contains all sub-networks of a space; ``activate`` chooses which of them ``forward`` runs.

    Args:
        space: the allowed values.
        widths: output channels of each stage; one entry per scale of the space's maximum.
        max_disparity: in pixels of the input; a multiple of 3 * 2 ** (scales - 1).
        modules: number of cost aggregation modules; the last ``deformable`` of them use deformable convolutions. With
            ``deformable=0`` the network can be exported to every runtime.
        refine_width, dilations: of the two refinements.
    """

    def __init__(
        self,
        space: Space = Space(),  # noqa: B008
        widths: tuple[int, ...] = (24, 32, 64, 128),
        max_disparity: int = 192,
        modules: int = 6,
        deformable: int = 3,
        refine_width: int = 32,
        dilations: tuple[int, ...] = (1, 2, 4, 8, 1, 1),
    ) -> None:
        super().__init__()
        scales = space.scales[-1]
        if len(widths) != scales:
            raise ValueError(f"widths={widths!r} must name {scales} stages, the largest number of scales in the space")
        if max_disparity < 1 or max_disparity % (3 * 2 ** (scales - 1)):
            raise ValueError(f"max_disparity={max_disparity} must be a multiple of {3 * 2 ** (scales - 1)}")
        if space.refine_widths and (space.refine_widths[-1] != refine_width or any(w % 2 for w in space.refine_widths)):
            raise ValueError(f"the space's refine_widths must be even and end with refine_width={refine_width}")
        if space.refine_depths and space.refine_depths[-1] != len(dilations):
            raise ValueError(f"the space's refine_depths must end with {len(dilations)}, the number of dilations")
        self.config: dict[str, Any] = {
            "space": {name: list(getattr(space, name)) for name in space.__dataclass_fields__},
            "widths": list(widths), "max_disparity": max_disparity, "modules": modules, "deformable": deformable,
            "refine_width": refine_width, "dilations": list(dilations),
        }  # fmt: skip
        self.space, self.max_disparity = space, max_disparity
        self.multiple = 3 * 2 ** (scales - 1)
        self.features = nn.ModuleList()
        for s, (c_in, c_out) in enumerate(zip((3, *widths), widths)):
            stage = [
                ElasticMBConv(c_out if b else c_in, c_out, space.kernels, space.expands, stride, s % 2 == 1)
                for b, stride in enumerate((2 if s else 3, *(1,) * (space.depths[-1] - 1)))
            ]
            self.features.append(nn.ModuleList(stage))
        self.aggregation = Aggregation([max_disparity // 3 >> s for s in range(scales)], modules, deformable)
        self.refinement = nn.ModuleList([Refinement(refine_width, dilations) for _ in range(2)])
        initialise(self)
        self.active = space.largest
        self._rects: dict[tuple[Any, ...], dict[str, Rect]] = {}
        self._shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}

    @classmethod
    def tiny(cls, deformable: int = 1) -> ElasticStereo:
        """Return a network with 40,790 parameters that trains on a laptop in minutes."""
        space = Space(kernels=(3, 5, 7), depths=(1, 2), expands=(2, 4), scales=(2,))
        return cls(space, (8, 16), 48, modules=2, deformable=deformable, refine_width=8, dilations=(1, 2, 4))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ElasticStereo:
        """Build a network with the same arguments as another, from its ``config``, which is plain data."""
        plain: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in config.items()}
        plain["space"] = Space(**{key: tuple(value) for key, value in config["space"].items()})
        return cls(**plain)

    def activate(self, net: SubNet) -> None:
        """Make ``forward`` run this sub-network from now on."""
        self.space.check(net)
        self.active = net

    def sample(self, rng: random.Random) -> SubNet:
        return self.space.sample(rng)

    def canonical(self, net: SubNet) -> SubNet:
        """Return the same network with the smallest ratios that give its widths: two ratios can round to one width."""
        stages = []
        for chosen, stage in zip(net.stages, self.features):
            blocks = list(zip(chosen, stage))  # type: ignore[call-overload]
            stages.append(
                tuple((k, min(x for x in self.space.expands if b.middle(x) == b.middle(e))) for (k, e), b in blocks)
            )
        return SubNet(tuple(stages), net.refine)

    def pyramid(self, x: Tensor) -> list[Tensor]:
        """Return one view's features with the active sub-network, the finest first."""
        found = []
        for genes, stage in zip(self.active.stages, self.features):
            for (kernel, expand), block in zip(genes, stage):  # type: ignore[call-overload]
                x = block(x, kernel, expand)
            found.append(x)
        return found

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        """Compute views ``[B, 3, H, W]`` -> scales + 2 disparities, coarse to fine; the last is ``[B, H, W]``."""
        check_size(left, right, self.multiple)
        return estimate(left, right, self.pyramid, self.aggregation, list(self.refinement), self.active.refine)

    def extract(self, net: SubNet) -> Stereo:
        """Return a plain network that computes the same as this one with ``net`` active; its weights are copies."""
        self.space.check(net)
        stages = [
            [block.extract(*genes) for genes, block in zip(chosen, stage)]  # type: ignore[call-overload]
            for chosen, stage in zip(net.stages, self.features)
        ]
        aggregation, ours = self.aggregation.fresh(net.scales), self.aggregation.state_dict()
        aggregation.load_state_dict({name: ours[name] for name in aggregation.state_dict()})
        refinement = [step.extract(net.refine) for step in self.refinement]  # type: ignore[operator]
        plain = Stereo(stages, aggregation, refinement)
        first = next(self.parameters())
        return plain.to(first.device, first.dtype).train(self.training)

    def sort_channels(self, segmented: bool = False) -> None:
        """Sort every block's middle channels by importance, before narrower widths are trained.

        The largest network computes the same as before, except for the order of its sums. The optimizer's state is not
        sorted: create a new optimizer.

        Args:
            segmented: sort only within the ranges between the allowed widths, as the published code does.
        """
        for stage in self.features:
            for block in stage:  # type: ignore[attr-defined]
                sort_block(block, self.space.expands if segmented else self.space.expands[-1:])

    def active_set(self, net: SubNet) -> ActiveSet:
        """Return the part of every parameter to which a backward of this sub-network can give a gradient."""
        self.space.check(net)
        rects: dict[str, Rect] = dict.fromkeys(self._shapes)
        for s, genes in enumerate(net.stages):
            for b, chosen in enumerate(genes):
                rects |= self._rectangles(f"features.{s}.{b}", *chosen)
        rects |= self._rectangles("aggregation", net.scales)
        for k in range(len(self.refinement)):
            rects |= self._rectangles(f"refinement.{k}", net.refine)
        return ActiveSet.of(self._shapes, rects)

    def _rectangles(self, name: str, *cut: Any) -> dict[str, Rect]:
        """Return the rectangles of a part's parameters by their whole names; made once, as every step asks for some."""
        key = (name, *cut)
        if key not in self._rects:
            part: Any = self.get_submodule(name)
            self._rects[key] = {f"{name}.{inner}": rect for inner, rect in part.rectangles(*cut).items()}
        return self._rects[key]
