"""Price a program's compute by the curves of ``core.pricing.costs``: helpers of ``Method.compute_seconds``.

The unit is the *pass*: each element of a tensor is read once or written once, as in the program's code for fp32
gradients without a loss scale. What a cache saves is in the measured rate, not in the count. Work on scalars, and work
that only the first step does, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from thinwire.core.methods.exchanges import collective_of, one_level
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Topology

READ, WRITE, COPY, IN_PLACE = 1.0, 1.0, 2.0, 2.0
ACCUMULATE = 3.0  # read gradient and residual, write their sum
FINITE = READ  # one aminmax
LINE_PASSES = 16.0  # a scattered element moves a cache line of 64 bytes
# Counted in the code of kernels.quantise, where a byte is a quarter of an element.
ENCODE, TERNARY, DECODE = 10.0, 15.0, 5.0
AT_RANDOM, ERROR = 6.0, 3.0  # beside ENCODE: noise instead of the nearest code; what is left of the input
MEANS = 22.0  # beside ENCODE: means of four bins
DRAW = 8.0  # a quarter of a 64-bit draw takes as long as that many passes, on a CPU


def elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


class Prices:
    def __init__(self, costs: Costs, ranks: int, topology: Topology | None = None) -> None:
        self._costs, self._ranks, self._topology = costs, ranks, topology

    def passes(self, count: float, size: float, itemsize: int = 4) -> float:
        moved = count * size * itemsize
        return self._costs.compute_seconds("memory", moved) if moved else 0.0

    def select(self, size: int) -> float:
        return self._costs.compute_seconds("select", size)

    def product(self, n: int, m: int, rank: int, passes: float, products: int = 1) -> float:
        """Return seconds of products of an n x m matrix with a thin one: the slowest of memory, few columns, FLOPs."""
        flops = 2.0 * n * m * rank * products
        few = self._costs.compute["thin"](n * m) * products if "thin" in self._costs.compute else 0.0
        return max(self.passes(passes, n * m), few, self._costs.compute_seconds("multiply", flops))

    def orthogonalise(self, rows: int, rank: int) -> float:
        return self._costs.compute_seconds("orthogonalise", 4.0 * rows * rank**2)

    def summed(
        self,
        before: float,
        after: float,
        size: int,
        *,
        deterministic: bool,
        itemsize: int = 4,
        collective: str = "flat",
    ) -> list[float]:
        """Return the segments around ``base.all_reduce`` of ``size`` elements, on the first rank of a node."""
        if not deterministic:
            way = collective_of(collective, size)
            if way == "flat" or self._topology is None or one_level(self._topology):
                return [before, after]
            if way == "torus" and size % self._topology.layout[0]:  # the padded copy
                before += self.passes(COPY, size, itemsize)
            return [before, 0.0, 0.0, after]
        if size % self._ranks:  # the padded copy
            before += self.passes(COPY, size, itemsize)
        return [before, 0.0, after]

    def decoupled(self, before: float, after: float, size: int, itemsize: int = 4) -> list[float]:
        """Return the segments around ``decoupling.decoupled_sum``: what follows the pause waits for a forward."""
        if size % self._ranks:  # the padded copy
            before += self.passes(COPY, size, itemsize)
        return [before, 0.0, 0.0, after]

    def average_decoupled(self, size: int, *, watch: bool = False) -> list[float]:
        """Return the segments of ``decoupling.average_decoupled``: the sum is received where it is needed."""
        return [self.passes(COPY, size), 0.0, 0.0, self.passes(FINITE if watch else 0.0, size)]

    def average_flat(
        self, size: int, *, deterministic: bool, watch: bool = False, collective: str = "flat"
    ) -> list[float]:
        elsewhere = deterministic or (
            collective_of(collective, size) == "torus" and self._topology and not one_level(self._topology)
        )
        after = (COPY if elsewhere else 0.0) + (FINITE if watch else 0.0)  # back into the bucket
        before, after = self.passes(COPY, size), self.passes(after, size)
        return self.summed(before, after, size, deterministic=deterministic, collective=collective)
