"""What a program's compute costs, in the curves of ``planner.costs``: helpers of ``Method.compute_seconds``.

The unit is the *pass*: each element of a tensor read once or written once, as the program's text does it on fp32
gradients without a loss scale. What a cache saves is in the measured rate, not in the count. Work on scalars, and on
the first step alone, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from thinwire.planner.costs import Costs

READ, WRITE, COPY, IN_PLACE = 1.0, 1.0, 2.0, 2.0
ACCUMULATE = 3.0  # gradient and residual in, their sum out
FINITE = READ  # one aminmax
LINE_PASSES = 16.0  # a scattered element moves a cache line of 64 bytes


def elements(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


class Prices:
    """Seconds of the steps that programs are made of.

    Args:
        costs: with the curves "memory", "select", "multiply" and "orthogonalise", as far as they are asked for.
        ranks: of the world.
    """

    def __init__(self, costs: Costs, ranks: int) -> None:
        self._costs, self._ranks = costs, ranks

    def passes(self, count: float, size: float, itemsize: int = 4) -> float:
        """So many passes over ``size`` elements."""
        moved = count * size * itemsize
        return self._costs.compute_seconds("memory", moved) if moved else 0.0

    def select(self, size: int) -> float:
        """The largest of ``size`` elements, found."""
        return self._costs.compute_seconds("select", size)

    def product(self, n: int, m: int, rank: int, passes: float, products: int = 1) -> float:
        """Products of an n x m matrix with a thin one: the memory of the large one, or the FLOPs if they take longer.

        Args:
            n, m, rank: of the matrices.
            passes: over the n x m elements.
            products: of 2 n m rank FLOPs each.
        """
        flops = 2.0 * n * m * rank * products
        return max(self.passes(passes, n * m), self._costs.compute_seconds("multiply", flops))

    def orthogonalise(self, rows: int, rank: int) -> float:
        """An orthonormal basis of rows x rank, by QR with the basis formed."""
        return self._costs.compute_seconds("orthogonalise", 4.0 * rows * rank**2)

    def summed(self, before: float, after: float, size: int, *, ordered: bool, itemsize: int = 4) -> list[float]:
        """The segments around ``base.all_reduce`` of ``size`` elements."""
        if not ordered:
            return [before, after]
        if size % self._ranks:  # the padded copy
            before += self.passes(COPY, size, itemsize)
        return [before, 0.0, after]

    def average_flat(self, size: int, *, ordered: bool, watch: bool = False) -> list[float]:
        """The segments of ``base.average_flat``: into the bucket and divided, sum."""
        if not size:
            return [0.0]
        after = (COPY if ordered else 0.0) + (FINITE if watch else 0.0)  # ordered: back into the bucket
        return self.summed(self.passes(COPY, size), self.passes(after, size), size, ordered=ordered)
