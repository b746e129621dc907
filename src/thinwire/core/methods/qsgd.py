"""QSGD: each element rounded at random to a few levels of its block, exchanged by all-gather. Unbiased, no state.

Paper: Alistarh et al.: QSGD, communication-efficient SGD via gradient quantization and encoding, 2017, arXiv
1610.02132, section 3.1.

s = 2^(bits - 1) - 1 levels (bits 2, 4, 8: 1, 7, 127). Per block v with N = max|v| or |v|_2, an element v_i becomes
sign(v_i) l N / s, where l is one of the two integers around s |v_i| / N, at random so that the mean is v_i. Variance:
the sum of (N / s)^2 f (1 - f), f = the fraction between the two levels; with "l2" at most min(d / s^2, sqrt(d) / s)
|v|^2 for a block of d elements. Message: all scales, then all codes, each tensor in whole bytes, or in whole blocks if
that is less than 1 % more: bits / 8 bytes per element, and 4 per block and peer.

Differences from the paper: codes have a fixed width, without Elias coding; N is the maximum by default, whose variance
is 11 to 47 times smaller for normal blocks of 512 elements. No error feedback: the rounding error is zero on average,
and with few levels its feedback would grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.core.checks import check_choice, check_count
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.quantise.linear import BITS, encode
from thinwire.core.methods.base import check_fusion, poison
from thinwire.core.methods.prices import AT_RANDOM, DECODE, DRAW, ENCODE, IN_PLACE, WRITE, Prices, elements
from thinwire.core.methods.rows import Rows
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Method, Program, Shapes, State, Topology


def check_block(block: Any) -> None:
    check_count("block", block, 8)
    if block % 8:
        raise ValueError(f"block={block!r} must be a multiple of 8, so that blocks begin at whole bytes")


@dataclass(frozen=True)
class QSGD(Method):
    """Send a few bits per element, rounded at random.

    Args:
        bits: per element: 2, 4 or 8.
        block: number of elements that share a scale, a multiple of 8; each tensor begins a new block.
        norm: the scale of a block: "max", its largest magnitude, or "l2", its Euclidean norm, as in the paper.
        seed: of the rounding. Draws depend only on the seed, the parameter's name, the step and the rank.
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "qsgd"
    loss: ClassVar[str] = "noisy"

    bits: int = 4
    block: int = 512
    norm: str = "max"
    seed: int = 0
    fusion: Any = "auto"

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_block(self.block)
        check_choice("norm", self.norm, ("max", "l2"))
        check_count("seed", self.seed, 0)
        check_fusion(self.fusion)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return codes and scales of each tensor in units of fp32 elements, rounded up."""
        return [-(-size * self.bits // 32) + -(-size // self.block) for size in super().payload(shapes, phase)]

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Draw and encode; then decode all ranks' codes."""
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        after = WRITE + DECODE * topology.world_size + IN_PLACE
        return [prices.passes(DRAW + ENCODE + AT_RANDOM, size), prices.passes(after, size)]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-gather of scales and codes."""
        rows = Rows.of(bucket, self.block)
        if not rows.slots:
            return
        a = rows.gradients()
        codes, scales = encode(a, self.bits, self.block, self.norm, rows.noise(self.seed, state))
        scales, codes, finite = yield from rows.gather(scales, codes, state)
        mean = poison(finite, state.size, a.dtype)
        rows.write(decode_sum(a, codes, scales, self.bits, self.block, mean))  # reused: fresh memory costs more
