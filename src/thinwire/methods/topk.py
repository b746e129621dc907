"""Top-k: send the k entries of largest magnitude of each bucket, keep the rest for later.

Papers: Aji, Heafield: Sparse communication for distributed gradient descent, 2017; Stich et al.: Sparsified SGD
with memory, 2018. Exchange: all-gather of (value, index) pairs, 8 k bytes per rank and peer for fp32.

A = M + E over the bucket (d elements); k = floor(density d), at least 1. Applied: 1/P times the sum over ranks of
the chosen entries. E = A, minus the values as sent: 0 there on an fp32 wire, the rounding error on a 16-bit one.

Differences from the papers: top-k is taken per bucket; E is in gradient units (the learning rate stays in the
optimizer), its rounding error is kept; a rejected step leaves E bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.kernels.pairs import WIRES, add_pairs, message_bytes, pack, to_wire, unpack, wire_dtype
from thinwire.kernels.select import ALGORITHMS, keep_count, top_k
from thinwire.methods.base import all_finite, check_choice, check_flag, check_merge, poison
from thinwire.methods.feedback import Warmup, accumulate_flat, stage_flat
from thinwire.methods.prices import ACCUMULATE, COPY, IN_PLACE, LINE_PASSES, WRITE, Prices, elements
from thinwire.planner.costs import Costs
from thinwire.program import AllGather, Bucket, Method, Program, State, Topology, working_dtype


@dataclass(frozen=True)
class TopK(Method):
    """Send the largest entries.

    Args:
        density: share of the elements that is sent, in (0, 1].
        exchange: "allgather".
        select: "exact".
        wire: dtype of the values on the wire: "fp32", "bf16" or "fp16".
        error_feedback: keep what was not sent; False is for ablations.
        warmup: a :class:`~thinwire.methods.feedback.Warmup`, or None.
        merge: fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "topk"
    has_residual: ClassVar[bool] = True

    density: float
    exchange: str = "allgather"
    select: str = "exact"
    wire: str = "fp32"
    error_feedback: bool = True
    warmup: Warmup | None = None
    merge: Any = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r} must be a number above 0 and at most 1")
        check_choice("exchange", self.exchange, ("allgather",))
        check_choice("select", self.select, tuple(ALGORITHMS))
        check_choice("wire", self.wire, tuple(WIRES))
        check_flag("error_feedback", self.error_feedback)
        if self.warmup is not None and not isinstance(self.warmup, Warmup):
            raise ValueError(f"warmup={self.warmup!r} must be a Warmup or None")
        check_merge(self.merge, sparse=True)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def dense(self, name: str, shape: Sequence[int], module: nn.Module | None) -> bool:
        """Vectors and embeddings stay dense: they are small, or sparse already."""
        return len(shape) < 2 or isinstance(module, (nn.Embedding, nn.EmbeddingBag))

    def payload(self, shapes: Sequence[Sequence[int]], phase: int) -> list[int]:
        """The message of each tensor in units of fp32 elements: 2 k for fp32 pairs."""
        return [
            message_bytes(keep_count(size, self.density), WIRES[self.wire]) // 4
            for size in super().payload(shapes, phase)
        ]

    def kept(self, d: int, step: int) -> int:
        """Entries sent for a bucket of ``d`` elements at a step."""
        rho = self.density if self.warmup is None else self.warmup.density(self.density, step)
        return keep_count(d, rho)

    def compute_seconds(
        self, shapes: Sequence[Sequence[int]], phase: int, topology: Topology, costs: Costs
    ) -> list[float]:
        """Accumulate, select, zero what is sent, pack; unpack, zero-fill, add and average the pairs of all ranks.

        The density is that after the warm-up.
        """
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        if not size:
            return [0.0]
        kept = keep_count(size, self.density)
        pairs = kept * topology.world_size
        gather, scatter, stream = LINE_PASSES, 2 * LINE_PASSES, 3.0  # of a pair; an int64 index is two elements
        before = prices.passes(ACCUMULATE if self.error_feedback else COPY, size) + prices.select(size)
        before += prices.passes(gather + (scatter if self.error_feedback else 0.0) + 6 * stream, kept)
        after = prices.passes(COPY + WRITE, size)  # the bucket's memory and the zeros in it
        if pairs < size:
            after += prices.passes(2 * scatter + gather + 6 * stream, pairs)
        else:
            after += prices.passes(scatter + 4 * stream, pairs) + prices.passes(IN_PLACE, size)
        return [before, after]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """One all-gather of pairs."""
        d = bucket.numel
        if d == 0:
            return
        if d > 2**31 - 1:
            raise ValueError(f"bucket {bucket.index} has {d} elements; indices are int32: use smaller buckets")
        k = min(d, bucket.kept) or self.kept(d, state.step)
        a = accumulate_flat(bucket, state) if self.error_feedback else bucket.gradient()
        values, index = top_k(a, k, self.select)
        sent = to_wire(torch.where(all_finite(values), values, torch.nan), wire_dtype(self.wire, a.dtype))
        if self.error_feedback:
            a[index] = values - sent.to(a.dtype)
            stage_flat(bucket, state, a)
        parts = yield AllGather(pack(sent, index))
        values, index = unpack(parts, k, sent.dtype)
        finite = all_finite(values)
        state.verdict(finite)
        self._deliver(bucket, values.to(a.dtype), index, finite)

    def _deliver(self, bucket: Bucket, values: Tensor, index: Tensor, finite: Tensor) -> None:
        """Write the mean of the ranks' pairs; in the gradient's own memory where its dtype allows."""
        ranks, dtype = values.shape[0], working_dtype(bucket.dtype)
        direct = bucket.dtype == dtype
        out = bucket.flat if direct else torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
        if direct and bucket.scale is not None:
            values = values * bucket.scale
        out.fill_(poison(finite, 0.0, dtype))
        add_pairs(out, values, index)
        if index.numel() < out.numel():
            touched = index.reshape(-1)
            out[touched] = out[touched] / ranks
        else:
            out.div_(ranks)
        if direct:
            bucket.write(out)
        else:
            bucket.write_gradient(out)
