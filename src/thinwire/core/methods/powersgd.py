"""Power-SGD: rank-r power iteration, two dependent all-reduces per bucket.

Paper: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.

A = M + E, n x m. P = orthogonalised sum of A Q, then Q = sum of At P; applied: P Qt / W. Elements sent per step: r
(n + m) plus the dense tensors, which go into the first message. ACP-SGD sends half of that in one exchange.

Differences from the paper: QR instead of Gram-Schmidt; the query that is carried over is orthogonalised (same
space, better conditioned); bases are seeded by parameter name; the error is the *local* one (A_w minus P Q_wt), as in
the authors' later library (epfml/powersgd) and unlike torch's hook; a tall matrix (n > m) counts as its transpose,
because otherwise the part of a rank's residual outside the m-dimensional column space of the mean would never be sent;
rejected steps leave the state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.core.kernels.lowrank import orthogonalise_all, project_left, project_right, subtract
from thinwire.core.methods.base import accumulate, all_finite, all_reduce, average_flat, poison
from thinwire.core.methods.lowrank import LowRank, common, pack, unpack, verify_bases, write_product
from thinwire.core.methods.prices import ACCUMULATE, COPY, FINITE, IN_PLACE, READ, WRITE, Prices
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Program, Slot, State, Topology


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Send both low-rank factors, one after the other. Options: see :class:`~thinwire.methods.acp.ACP`."""

    name: ClassVar[str] = "powersgd"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"rank": 4},)
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (3, ({"rank": 4},))

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """Return elements sent per tensor: r (n + m), all of a dense tensor."""
        return [
            rank * (int(shape[0]) + size // int(shape[0])) if (rank := self.rank_of(shape)) else size
            for shape, size in ((shape, math.prod(shape)) for shape in shapes)
        ]

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Accumulate, A Q, pack; a basis, At P, the residual, pack; then the next query and P Qt."""
        low, dense = self.matrices(shapes)
        prices = Prices(costs, topology.world_size)
        if not low:
            return prices.average_flat(dense, deterministic=self.deterministic, watch=True)
        feedback = self.error_feedback
        before, between = prices.passes(IN_PLACE, dense), 0.0
        after = prices.passes(FINITE + IN_PLACE + COPY, dense)
        first, second = dense, 0
        for n, m, r in low:
            short, long = sorted((n, m))  # a tall matrix counts as its transpose
            first, second = first + short * r, second + long * r
            before += prices.passes(ACCUMULATE if feedback else 0.0, n * m) + prices.product(n, m, r, READ)
            between += prices.orthogonalise(short, r) + prices.product(n, m, r, READ)
            between += prices.product(n, m, r, IN_PLACE) if feedback else 0.0
            after += prices.orthogonalise(long, r) + prices.product(n, m, r, WRITE)
        after += prices.passes(FINITE, first - dense) + prices.passes(FINITE + IN_PLACE, second)
        before, between = before + prices.passes(COPY, first), between + prices.passes(COPY, second)
        head = prices.summed(before, between, first, deterministic=self.deterministic)
        tail = prices.summed(between, after, second, deterministic=self.deterministic)
        broadcast = [0.0] if self.bases_from_first else []
        return head[:-1] + broadcast + tail + broadcast

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """All-reduce A Q and the dense tensors, then At P (tall matrices: transposed)."""
        low, dense = self.sort(bucket)
        if not low:
            yield from average_flat(bucket, state, deterministic=self.deterministic, watch=True)
            return
        matrices = [self._matrix(slot, state) for slot in low]
        tall = [a.shape[0] > a.shape[1] for a in matrices]
        queries = [self.basis("p" if t else "q", slot, state) for slot, t in zip(low, tall)]
        thin = [project_right(a, x) if t else project_left(a, x) for a, x, t in zip(matrices, queries, tall)]
        first = yield from all_reduce(pack(thin, dense, state.size), state, deterministic=self.deterministic)
        sums, rest = unpack(first, thin, dense)
        bases = yield from common(self, orthogonalise_all(sums), state)
        local = [project_left(a, x) if t else project_right(a, x) for a, x, t in zip(matrices, bases, tall)]
        if self.error_feedback:
            for slot, a, basis, x, t in zip(low, matrices, bases, local, tall):
                subtract(a, *((x, basis) if t else (basis, x)))
                state.stage(slot.name, residual=a.view(slot.shape))
        second = yield from all_reduce(pack(local), state, deterministic=self.deterministic)
        sums, _ = unpack(second, local)
        finite = all_finite(first) & all_finite(second)
        state.verdict(finite)
        for slot, query, t in zip(low, (yield from common(self, orthogonalise_all(sums), state)), tall):
            state.stage(slot.name, shared={"p" if t else "q": query})
        divisor = poison(finite, state.size, second.dtype)
        for slot, basis, total, t in zip(low, bases, sums, tall):
            mean = total / divisor
            write_product(slot, *((mean, basis) if t else (basis, mean)))
        for slot, piece in zip(dense, rest):
            slot.write(piece * poison(finite, 1.0, piece.dtype))
        yield from verify_bases(self, low, queries, state, state.step)

    def _matrix(self, slot: Slot, state: State) -> Tensor:
        return accumulate(slot, state).view(slot.shape[0], -1) if self.error_feedback else slot.matrix()
