"""ACP-SGD: alternate compressed power iteration. One thin factor per step and one all-reduce, like S-SGD.

Paper: Zhang, Zhang, Shi, Chu, Li: Evaluation and Optimization of Gradient Compression for Distributed Deep Learning,
ICDCS 2023, arXiv 2306.08881.

A = M + E, n x m, per tensor: P is n x r, Q is m x r. Even steps send A Q and apply mean(A) Q Qt; odd steps send At
P and apply P Pt mean(A). A pair of steps is one power iteration. Elements sent per step: r n or r m, plus the tensors
that stay dense.

Differences from the paper: the first bases are seeded by parameter name; factors are orthogonalised at the end of a
step instead of before the exchange; the error is the *local* one, A_w minus what rank w sent, as in the authors' code
(its mean is the paper's error, and its norm does not grow); only tensors for which it pays are compressed
(``compress="matrices"``: all); rejected steps leave the state unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.core.kernels.lowrank import peel_left, peel_right, project_left, project_right
from thinwire.core.kernels.orthogonal import orthogonalise_all, views
from thinwire.core.methods.base import all_finite, all_reduce, average_flat
from thinwire.core.methods.decoupling import Decoupling, average_decoupled, check_decoupling, decoupled_sum
from thinwire.core.methods.exchanges import check_collective
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
class ACP(LowRank, Decoupling):
    """Send one low-rank factor per step.

    Args:
        rank: columns of a factor.
        compress: "paying": matrices with rank < min(n, m) that shrink at least ``min_rate`` times; "matrices": all.
        min_rate: smallest compression, in elements, at which a tensor is compressed.
        error_feedback: keep what was not sent and add it to the next gradient; False is for ablations.
        seed: of the first bases.
        verify_every: steps between checks that the bases are bitwise equal on all ranks (also in the second compressed
            step); 0: never.
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
        deterministic: sum in rank order: equal bits under any plan.
        bases_from_first: send the first rank's bases to all, for processors that round differently. ``attach`` sets it
            if it finds such.
        collective, decoupled, check_finite, update_in_step, poison_stale: as for :class:`~thinwire.methods.ssgd.SSGD`.
    """

    name: ClassVar[str] = "acp"
    phases: ClassVar[int] = 2
    factors: ClassVar[float] = 0.5
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"rank": 4}, {"rank": 32})
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (2, ({"rank": 4},))

    collective: str = "flat"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_collective(self.collective, deterministic=self.deterministic)
        check_decoupling(self, residual=self.has_residual, collective=self.collective)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return elements sent per tensor: r n in phase 0, r m in phase 1, all of a dense tensor."""
        sizes = super().payload(shapes, phase)
        for i, shape in enumerate(shapes):
            if rank := self.rank_of(shape):
                sizes[i] = rank * (int(shape[0]) if phase % 2 == 0 else sizes[i] // int(shape[0]))
        return sizes

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Accumulate, project and peel, pack; then the next basis and the product for the mean."""
        low, dense = self.matrices(shapes)
        prices = Prices(costs, topology.world_size, topology)
        if not low and self.decoupled:
            return prices.average_decoupled(dense, watch=True)
        if not low:
            return prices.average_flat(dense, deterministic=self.deterministic, watch=True, collective=self.collective)
        sent, before, after = dense, prices.passes(IN_PLACE, dense), prices.passes(IN_PLACE + COPY, dense)
        for n, m, r in low:
            rows = m if phase % 2 else n  # of the factor that is sent
            sent += rows * r
            if self.error_feedback:  # an odd step reads A once more, because its peel is not blocked
                peel = IN_PLACE + (READ if phase % 2 else 0.0)
                before += prices.passes(ACCUMULATE, n * m) + prices.product(n, m, r, peel, products=2)
            else:
                before += prices.product(n, m, r, READ)
            after += prices.orthogonalise(rows, r) + prices.product(n, m, r, WRITE)
        after += prices.passes(FINITE, sent) + prices.passes(IN_PLACE, sent - dense)
        before += prices.passes(COPY, sent)
        broadcast = [0.0] if self.bases_from_first else []
        if self.decoupled:
            return prices.decoupled(before, after, sent) + broadcast
        summed = prices.summed(before, after, sent, deterministic=self.deterministic, collective=self.collective)
        return summed + broadcast

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-reduce of a factor; even steps send P, odd steps Q."""
        low, dense = self.sort(bucket)
        step, turn = state.step, state.turn  # read now: the step may be counted before the rest of this runs
        if not low and self.decoupled:
            yield from average_decoupled(bucket, state, watch=True)
            return
        if not low:
            yield from average_flat(
                bucket, state, deterministic=self.deterministic, watch=True, collective=self.collective
            )
            return
        moving, fixed = ("p", "q") if turn % 2 == 0 else ("q", "p")
        batches = self.batches(low)
        bases = [self.bases(fixed, batch, state) for batch in batches]
        shapes = [self.factors_of(moving, batch) for batch in batches]
        message, local = room(shapes, dense, bases[0])
        matrices = self.matrices_of(batches, state)
        for a, basis, factor in zip(matrices, bases, local):  # with feedback, A becomes the residual
            self._project(a, basis, factor, moving)
        put_dense(message, dense, state.size)
        if self.decoupled:
            factors = sum(x.numel() for x in local)
            total = yield from decoupled_sum(message, state, sums=factors, unscaled=True)
        else:
            total = yield from all_reduce(message, state, deterministic=self.deterministic, collective=self.collective)
        finite = all_finite(total)
        state.verdict(finite)
        stage(state, moving, batches, (yield from common(self, orthogonalise_all(total, shapes), state)))
        total[: total.numel() - sum(slot.numel for slot in dense)].div_(divisor(finite, low[0], state.size))
        means = views(total, shapes)
        write_means(batches, *((means, bases) if moving == "p" else (bases, means)))
        write_dense(total, dense, finite)
        yield from verify_bases(self, batches, bases, state, step)

    def _project(self, a: Tensor, basis: Tensor, factor: Tensor, moving: str) -> None:
        if self.error_feedback:
            (peel_left if moving == "p" else peel_right)(a, basis, factor)
        else:
            (project_left if moving == "p" else project_right)(a, basis, factor)
