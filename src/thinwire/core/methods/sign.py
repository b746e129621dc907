"""SignSGD: one bit per element and one scale per tensor, exchanged by all-gather.

Papers: Karimireddy et al.: Error feedback fixes SignSGD, 2019, arXiv 1901.09847 (the default); Seide et al.: 1-bit
stochastic gradient descent, 2014 (``levels=2``); Bernstein et al.: signSGD, 2018, arXiv 1802.04434
(``vote="majority"``).

A = M + E, d elements. Sent: bit 1 where A >= 0, and s = |A|_1 / d; decoded +s or -s, so that results keep gradient
units. ``levels=2``: two values, the mean of the elements >= 0 and of those below. ``vote="majority"``: the sign of
the sum of signs, where a tie is 0; units are then +-1 and the learning rate must be chosen again. Message: all scales,
then all bits, each tensor in whole bytes: d / 8 bytes per tensor and peer.

Differences from the papers: E does not contain the learning rate; scales are per tensor; an element that is zero takes
bit (index + step + rank) mod 2 under "majority", so that an element that is zero everywhere does not drift. From 1-bit
SGD: the two values are per tensor, not per column of a matrix; messages are gathered, not summed and quantised again by
an owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_flag
from thinwire.core.kernels.quantise.bins import TILE, means_of_sides, pack_signs
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.methods.base import all_finite, check_fusion, poison
from thinwire.core.methods.prices import ACCUMULATE, IN_PLACE, WRITE, Prices, elements
from thinwire.core.methods.rows import Rows
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Method, Program, Shapes, State, Topology


@dataclass(frozen=True)
class SignSGD(Method):
    """Send the sign of each element.

    Args:
        error_feedback: keep what was not sent and add it to the next gradient.
        vote: "mean" of the ranks' decoded messages, or "majority" of their signs (only without feedback).
        levels: 1 or 2 magnitudes per tensor (2 only with "mean").
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "signsgd"
    has_residual: ClassVar[bool] = True
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (5, ({},))

    error_feedback: bool = True
    vote: str = "mean"
    levels: int = 1
    fusion: Any = "auto"

    def __post_init__(self) -> None:
        check_flag("error_feedback", self.error_feedback)
        check_choice("vote", self.vote, ("mean", "majority"))
        check_choice("levels", self.levels, (1, 2))
        if self.vote == "majority" and self.error_feedback:
            raise ValueError("vote='majority' has no gradient units to feed back: add error_feedback=False")
        if self.vote == "majority" and self.levels == 2:
            raise ValueError("vote='majority' counts signs alone: levels=2 needs vote='mean'")
        check_fusion(self.fusion)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return bits and scales of each tensor in units of fp32 elements, rounded up."""
        return [-(-size // 32) + self.levels if size else 0 for size in super().payload(shapes, phase)]

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Accumulate, encode, decode this rank's bits; then decode all ranks' bits."""
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        # Counted in the code of _encode, where a bool is a quarter of a pass.
        encode = 18.1 if self.vote == "majority" else 3.6 if self.levels == 1 else 10.1
        row = 2 * IN_PLACE  # the table's values out and in, and the sum
        own = ACCUMULATE + row if self.error_feedback else 0.0
        deliver = WRITE + row * topology.world_size + IN_PLACE * (2 if self.vote == "majority" else 1)
        return [prices.passes(own + encode, size), prices.passes(deliver, size)]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-gather of scales and bits."""
        rows = Rows.of(bucket, 8)  # a byte of bits
        if not rows.slots:
            return
        a = rows.accumulate(state) if self.error_feedback else rows.gradients()
        table, majority = self._table(a, rows), self.vote == "majority"
        bits = pack_signs(_without_zeros(a, state) if majority else a)
        if self.error_feedback:
            decode_sum(a, bits[None], None, 1, 8, values=_values(table[None]), owner=rows.owner, take=True)
            rows.stage(state, a)
        tables, bits, finite = yield from rows.gather(table, bits, state)
        out = torch.empty_like(a) if self.error_feedback else a
        share = poison(finite, 1 if majority else state.size, a.dtype)
        decode_sum(out, bits, None, 1, 8, None if majority else share, values=_values(tables), owner=rows.owner)
        rows.write(out.sign_().div_(share) if majority else out)

    def _table(self, a: Tensor, rows: Rows) -> Tensor:
        """Return each tensor's magnitude, [T, 1], or means above and below, [T, 2]; NaN or inf if any element is."""
        if self.vote == "majority":
            return poison(all_finite(a), 1.0, a.dtype).repeat(len(rows.slots), 1)
        if self.levels == 2:
            return means_of_sides(a, rows.cut(a), rows.sizes, rows.tiles(TILE)).flip(1)
        return (torch.stack(torch._foreach_norm(rows.cut(a), 1)) / rows.sizes)[:, None]


def _values(table: Tensor) -> Tensor:
    """Return what bits stand for, ``[.., 2]``."""
    return table.flip(-1) if table.shape[-1] == 2 else torch.cat([-table, table], -1)


def _without_zeros(a: Tensor, state: State) -> Tensor:
    """Put 1 where an element is zero and (index + step + rank) is odd, else -1."""
    pairs, turn = a.view(-1, 2), a.new_full((2,), -1.0)
    turn[(state.step + state.rank + 1) % 2] = 1.0
    return torch.where(pairs == 0, turn, pairs).view(-1)
