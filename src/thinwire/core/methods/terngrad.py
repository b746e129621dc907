"""TernGrad: -1, 0 or 1 per element, drawn at random so that the mean is the gradient; summed as int8. No state.

Paper: Wen et al.: TernGrad, ternary gradients to reduce communication in distributed deep learning, 2017, arXiv
1705.07878, sections 3.1 and 3.3 (shared scales and clipping).

Per tensor: clamp g to +-clip sigma, s_w = max|g|, S = the largest s_w of the ranks, code = sign(g) with probability
|g| / S, else 0; applied: S / P times the sum of codes. Variance of an element: |g| (S - |g|). Sent: 4 bytes per
tensor and peer, then one byte per element in an all-reduce.

Differences from the paper: codes are summed by an all-reduce of int8 instead of a server, hence at most 127 ranks;
sigma is the root mean square of the tensor, its standard deviation about zero, so that a constant tensor, or one with a
single element, is not clamped to nothing. ``clip`` biases the result, as in the paper; None is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_count, check_number
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.quantise.linear import encode
from thinwire.core.methods.base import all_finite, check_fusion, poison
from thinwire.core.methods.prices import COPY, DRAW, IN_PLACE, READ, TERNARY, Prices, elements
from thinwire.core.methods.rows import Rows
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import AllGather, AllReduce, Bucket, Method, Program, Shapes, State, Topology

_MOST_RANKS = 127  # the largest number whose sum fits into an int8
_WIDTH = 512  # elements in a row


@dataclass(frozen=True)
class TernGrad(Method):
    """Send a sign or zero for each element.

    Args:
        clip: first clamp each tensor to that many standard deviations (about zero); None: do not.
        seed: of the draws, which depend only on the seed, the parameter's name, the step and the rank.
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "terngrad"
    loss: ClassVar[str] = "noisy"

    clip: float | None = 2.5
    seed: int = 0
    fusion: Any = "auto"

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        check_count("seed", self.seed, 0)
        check_fusion(self.fusion)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return a byte per element and a scale, in units of fp32 elements, rounded up."""
        return [-(-size // 4) + 1 if size else 0 for size in super().payload(shapes, phase)]

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Compute scales; draws and codes; then their sum as floats."""
        _check_ranks(topology.world_size)
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        scale = READ if self.clip is None else 2 * READ
        after = 1.25 + IN_PLACE + COPY  # an int8 is a quarter of a pass
        return [prices.passes(scale, size), prices.passes(DRAW + TERNARY, size), prices.passes(after, size)]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """All-gather the scales, of which the largest counts; then do one all-reduce of int8."""
        _check_ranks(state.size)
        rows = Rows.of(bucket, _WIDTH)
        if not rows.slots:
            return
        a = rows.gradients()
        own = magnitudes(rows.cut(a), self.clip)
        shared = _largest((yield AllGather(own)))
        finite = all_finite(shared)
        state.verdict(finite)
        limits, tops = torch.stack([own, shared]).index_select(1, rows.owner).unbind()
        noise = rows.noise(self.seed, state)
        codes, scales = encode(a, 2, _WIDTH, noise=noise, shared=(limits, tops))
        sent = rows.sent(codes)
        codes = rows.spread((yield AllReduce(sent[0] if len(sent) == 1 else torch.cat(sent))), _WIDTH)
        rows.write(decode_sum(a, codes[None], scales[None], 8, _WIDTH, poison(finite, state.size, a.dtype)))


def magnitudes(tensors: Sequence[Tensor], clip: float | None) -> Tensor:
    """Return max|a| of each tensor, at most ``clip`` times its root mean square; NaN or infinite if any element is."""
    if tensors[0].device.type == "meta":
        return tensors[0].new_empty(len(tensors))
    if tensors[0].is_cuda:
        top = torch.stack(torch._foreach_norm([*tensors], torch.inf))
    else:  # many times as fast as the norm
        low, high = (torch.stack(ends) for ends in zip(*map(torch.aminmax, tensors)))
        top = torch.maximum(-low, high)
    if clip is None:
        return top
    factors = [clip / a.numel() ** 0.5 for a in tensors]
    limit = torch.stack(torch._foreach_mul(torch._foreach_norm([*tensors]), factors))
    return torch.where(limit > 0, torch.minimum(top, limit), top)  # no limit if all squares underflow to 0


def _largest(scales: Tensor) -> Tensor:
    return scales.new_empty(scales.shape[1:]) if scales.device.type == "meta" else scales.amax(0)


def _check_ranks(ranks: int) -> None:
    if ranks > _MOST_RANKS:
        raise ValueError(
            f"TernGrad sums codes as int8, which is enough for {_MOST_RANKS} ranks, not {ranks}: use QSGD(bits=2)"
        )
