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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.core.kernels.lowrank import project_left, project_right, subtract
from thinwire.core.kernels.orthogonal import orthogonalise_all, views
from thinwire.core.methods.base import all_finite, all_reduce, average_flat
from thinwire.core.methods.lowrank import (
    LowRank,
    common,
    divisor,
    put_dense,
    room,
    stage,
    verify_bases,
    write_dense,
    write_means,
)
from thinwire.core.methods.prices import ACCUMULATE, COPY, FINITE, IN_PLACE, READ, WRITE, Prices
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Program, Shapes, State, Topology


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Send both low-rank factors, one after the other. Options: see :class:`~thinwire.methods.acp.ACP`."""

    name: ClassVar[str] = "powersgd"
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"rank": 4},)
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (3, ({"rank": 4},))

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return elements sent per tensor: r (n + m), all of a dense tensor."""
        return [
            rank * (int(shape[0]) + size // int(shape[0])) if (rank := self.rank_of(shape)) else size
            for shape, size in ((shape, math.prod(shape)) for shape in shapes)
        ]

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
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
        batches = self.batches(low)
        matrices = self.matrices_of(batches, state)
        tall = [a.shape[1] > a.shape[2] for a in matrices]
        sides = [("p", "q") if t else ("q", "p") for t in tall]  # what is kept as the query, and the basis made of it
        queries = [self.bases(query, batch, state) for (query, _), batch in zip(sides, batches)]
        short = [self.factors_of(basis, batch) for (_, basis), batch in zip(sides, batches)]
        long = [query.shape for query in queries]
        message, thin = room(short, dense, queries[0])
        for a, query, out, t in zip(matrices, queries, thin, tall):
            (project_right if t else project_left)(a, query, out)
        put_dense(message, dense, state.size)
        first = yield from all_reduce(message, state, deterministic=self.deterministic)
        bases = yield from common(self, orthogonalise_all(first, short), state)
        message, local = room(long, (), queries[0])
        for a, basis, out, t in zip(matrices, bases, local, tall):
            (project_left if t else project_right)(a, basis, out)
            if self.error_feedback:
                subtract(a, *((out, basis) if t else (basis, out)))
        second = yield from all_reduce(message, state, deterministic=self.deterministic)
        finite = all_finite(first) & all_finite(second)
        state.verdict(finite)
        found = yield from common(self, orthogonalise_all(second, long), state)
        for batch, query, (side, _) in zip(batches, found, sides):
            stage(state, side, [batch], [query])
        means = views(second.div_(divisor(finite, low[0], state.size)), long)
        pairs = [(mean, basis) if t else (basis, mean) for mean, basis, t in zip(means, bases, tall)]
        write_means(batches, [left for left, _ in pairs], [right for _, right in pairs])
        write_dense(first, dense, finite)
        yield from verify_bases(self, batches, queries, state, state.step)
