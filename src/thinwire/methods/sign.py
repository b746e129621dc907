"""SignSGD: one bit per element and one scale per tensor, exchanged by all-gather.

Papers: Karimireddy et al.: Error feedback fixes SignSGD, 2019, arXiv 1901.09847 (the default); Seide et al.: 1-bit
stochastic gradient descent, 2014 (``levels=2``); Bernstein et al.: signSGD, 2018, arXiv 1802.04434
(``vote="majority"``).

A = M + E, d elements. Sent: bit 1 where A >= 0, and s = |A|_1 / d; decoded +s or -s, so that results keep gradient
units. ``levels=2``: two values, the mean of the elements >= 0 and of those below. ``vote="majority"``: the sign of
the sum of signs, a tie is 0; units are then +-1 and the learning rate must be chosen anew. Message: all scales,
then all bits, each tensor in whole bytes: d / 8 bytes per tensor and peer.

Differences from the papers: E does not contain the learning rate; scales are per tensor; a majority element that is
zero takes bit (index + step + rank) mod 2, so that an element that is zero everywhere does not drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.kernels.bits import add_values, pack_bits, pack_signs
from thinwire.methods.base import all_finite, check_choice, check_flag, check_merge, own_memory, poison
from thinwire.methods.feedback import accumulate
from thinwire.methods.prices import ACCUMULATE, IN_PLACE, WRITE, Prices, elements
from thinwire.planner.costs import Costs
from thinwire.program import AllGather, Bucket, Method, Program, Slot, State, Topology, working_dtype


@dataclass(frozen=True)
class SignSGD(Method):
    """Send signs.

    Args:
        error_feedback: keep what was not sent and add it to the next gradient.
        vote: "mean" of the ranks' decoded messages, or "majority" of their signs (without feedback only).
        levels: 1 or 2 magnitudes per tensor ("mean" only).
        merge: fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "signsgd"
    has_residual: ClassVar[bool] = True

    error_feedback: bool = True
    vote: str = "mean"
    levels: int = 1
    merge: Any = "auto"

    def __post_init__(self) -> None:
        check_flag("error_feedback", self.error_feedback)
        check_choice("vote", self.vote, ("mean", "majority"))
        check_choice("levels", self.levels, (1, 2))
        if self.vote == "majority" and self.error_feedback:
            raise ValueError("vote='majority' has no gradient units to feed back: add error_feedback=False")
        if self.vote == "majority" and self.levels == 2:
            raise ValueError("vote='majority' counts signs alone: levels=2 needs vote='mean'")
        check_merge(self.merge)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """Bits and scales of each tensor in units of fp32 elements, rounded up."""
        return [-(-size // 32) + self.levels if size else 0 for size in super().payload(shapes, phase)]

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Accumulate, encode, decode one's own bits; decode those of all ranks."""
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        if not size:
            return [0.0]
        # By the text of _encode, where a bool is a quarter of a pass.
        encode = 18.1 if self.vote == "majority" else 3.6 if self.levels == 1 else 10.1
        row = 2 * IN_PLACE  # the table's values out and in, and the sum
        own = ACCUMULATE + row if self.error_feedback else 0.0
        deliver = WRITE + row * topology.world_size + IN_PLACE * (2 if self.vote == "majority" else 1)
        return [prices.passes(own + encode, size), prices.passes(deliver, size)]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """One all-gather of scales and bits."""
        slots = [slot for slot in bucket.slots if slot.numel]
        if not slots:
            return
        scales, bits = [], []
        for slot in slots:
            a = accumulate(slot, state) if self.error_feedback else slot.gradient()
            code, pair = self._encode(a.reshape(-1), state)
            scales.append(pair[: self.levels])
            bits.append(code)
            if self.error_feedback:
                add_values(a.view(-1), code[None], -pair[:1], -pair[1:])
                state.stage(slot.name, residual=a)
        message = torch.cat([torch.cat(scales).view(torch.uint8), *bits])
        everyone = yield AllGather(message)
        dtype, head = working_dtype(bucket.dtype), self.levels * len(slots)
        start = head * dtype.itemsize
        table = everyone[:, :start].reshape(-1).view(dtype).view(-1, len(slots), self.levels)
        finite = all_finite(table)
        state.verdict(finite)
        divisor = poison(finite, 1 if self.vote == "majority" else state.size, dtype)
        for i, slot in enumerate(slots):
            end = start + bits[i].numel()
            self._deliver(slot, everyone[:, start:end], table[:, i], divisor)
            start = end

    def _encode(self, a: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The bits of a 1-D tensor, and the two values that they stand for, [2]; NaN or inf if any element is."""
        if self.vote == "majority":
            turn = (torch.arange(a.numel(), device=a.device) + (state.step + state.rank)) % 2 == 1
            one = poison(all_finite(a), 1.0, a.dtype)
            return pack_bits(torch.where(a == 0, turn, a > 0)), torch.stack([one, -one])
        if self.levels == 1:
            scale = torch.linalg.vector_norm(a, 1) / a.numel()
            return pack_signs(a), torch.stack([scale, -scale])
        mask = a >= 0
        high = torch.where(mask, a, 0).sum() / mask.sum().clamp(min=1)
        low = torch.where(mask, 0, a).sum() / (~mask).sum().clamp(min=1)
        return pack_bits(mask), torch.stack([high, low])

    def _deliver(self, slot: Slot, bits: Tensor, scales: Tensor, divisor: Tensor) -> None:
        """Write the mean, or the majority, of what the ranks' bits [P, bytes] and scales [P, levels] stand for."""
        target = own_memory(slot)
        out = scales.new_empty(slot.numel) if target is None else target.view(-1)
        add_values(out.zero_(), bits, scales[:, 0], scales[:, 1] if self.levels == 2 else -scales[:, 0])
        if self.vote == "majority":
            out.sign_()
        out.div_(divisor)
        if target is None:
            slot.write(out)
