"""Top-k: send the k entries of largest magnitude of each bucket, and keep the rest for later.

Papers: Aji, Heafield: Sparse communication for distributed gradient descent, 2017; Stich et al.: Sparsified SGD
with memory, 2018. Exchanges: all-gather of (value, index) pairs, 8 k bytes per rank and peer for fp32; pairwise merges
(:mod:`~thinwire.methods.butterfly`); by region (:mod:`~thinwire.methods.regions`).

A = M + E over the bucket (d elements); k = floor(density d), at least 1. Applied: 1/P times the sum over ranks of
the chosen entries. E = A minus the values as sent: at sent entries 0 with fp32 values, the rounding error with 16 bits.

Differences from the papers: top-k is taken per bucket; E is in gradient units (the learning rate stays in the
optimizer), and its rounding error is kept; a rejected step leaves E unchanged, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.core.checks import check_choice, check_flag, check_number
from thinwire.core.kernels.pairs import pack, send, wire_dtype
from thinwire.core.kernels.select import keep_count
from thinwire.core.methods.base import Warmup, accumulate_flat, all_finite, check_fusion, stage_flat
from thinwire.core.methods.butterfly import butterfly
from thinwire.core.methods.prices import Prices, elements
from thinwire.core.methods.regions import by_region, capacity_of
from thinwire.core.methods.sparse import (
    EXCHANGES,
    assumed_cheapest,
    cheapest,
    check_options,
    check_size,
    choose,
    deliver,
    message_units,
    segments,
    stays_dense,
)
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import AllGather, Bucket, Method, Program, Shapes, State, Topology


@dataclass(frozen=True)
class TopK(Method):
    """Send the largest entries.

    Args:
        density: share of the elements that is sent, in (0, 1].
        exchange: "allgather", "gtopk", "oktopk", or "auto": the cheapest for each bucket, by measured costs if the plan
            is made from them (``fusion="optimal"``, ``plan="adaptive"``), else by those of an assumed link.
        select: the selection algorithm, see :func:`thinwire.kernels.select.top_k`.
        value_dtype: of the values as sent: "fp32", "bf16" or "fp16"; "gtopk" needs "fp32".
        error_feedback: keep what was not sent; False is for ablations.
        warmup: a :class:`~thinwire.methods.base.Warmup`, or None.
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
        capacity: room for one region's pairs under "oktopk", in units of k / P; at least 1.
    """

    name: ClassVar[str] = "topk"
    has_residual: ClassVar[bool] = True
    start_steps: ClassVar[int] = 2
    selects: ClassVar[bool] = True
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({"density": 0.01}, {"density": 0.001})
    auto: ClassVar[tuple[int, tuple[Mapping[str, Any], ...]] | None] = (4, ({"density": 0.01, "exchange": "auto"},))

    density: float
    exchange: str = "allgather"
    select: str = "exact"
    value_dtype: str = "fp32"
    error_feedback: bool = True
    warmup: Warmup | None = None
    fusion: Any = "auto"
    capacity: float = 1.5

    def __post_init__(self) -> None:
        check_options(self.density, self.select, self.value_dtype, self.warmup)
        check_choice("exchange", self.exchange, (*EXCHANGES, "auto"))
        if self.exchange == "gtopk" and self.value_dtype != "fp32":
            raise ValueError(
                f"value_dtype={self.value_dtype!r} would round the two sides of a merge differently: "
                'gTop-k needs "fp32"'
            )
        check_flag("error_feedback", self.error_feedback)
        check_fusion(self.fusion, sparse=True)
        check_number("capacity", self.capacity, least=1)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """Return True for vectors and embeddings: they are small, or sparse already."""
        return stays_dense(shape, embedding)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return each tensor's message in units of fp32 elements: 2 k for fp32 pairs; "oktopk": all its boxes."""
        room = self.capacity if self.exchange == "oktopk" else 1.0
        kept = (keep_count(size, self.density) for size in super().payload(shapes, phase))
        return message_units((math.ceil(room * k) for k in kept), self.value_dtype)

    def kept(self, d: int, step: int) -> int:
        """Return the number of entries sent for a bucket of ``d`` elements at a step."""
        rho = self.density if self.warmup is None else self.warmup.density(self.density, step)
        return keep_count(d, rho)

    def exchange_of(self, d: int, k: int, ranks: int) -> str:
        """Return a bucket's exchange; "auto", if no plan has decided, follows from these numbers alone."""
        if self.exchange != "auto":
            return self.exchange
        return assumed_cheapest(d, k, ranks, self.value_dtype, self.capacity)

    def plan_exchange(self, shapes: Shapes, kept: int, topology: Topology, costs: Costs) -> str:
        """Return, for "auto", the cheapest exchange of a bucket by measured costs."""
        size = elements(shapes)
        if self.exchange != "auto" or not size or topology.world_size == 1:
            return ""
        k = min(size, kept) or keep_count(size, self.density)
        return cheapest(size, k, topology.world_size, costs, self.value_dtype, self.capacity)

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Accumulate, select, pack; merge or sum by region; zero what was sent, add and average the pairs.

        For the density after the warm-up.
        """
        size, ranks = elements(shapes), topology.world_size
        kept = keep_count(size, self.density)
        exchange, prices = self.exchange_of(size, kept, ranks), Prices(costs, ranks)
        return segments(exchange, size, kept, ranks, prices, feedback=self.error_feedback, capacity=self.capacity)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Select, exchange, keep what was not taken, deliver."""
        d, ranks = bucket.numel, state.size
        if d == 0:
            return
        check_size(bucket)
        k = min(d, bucket.kept) or self.kept(d, state.step)
        a = accumulate_flat(bucket, state) if self.error_feedback else bucket.gradient()
        values, index, finite = choose(a, k, self.select, bucket, state)
        exchange, wire = self.exchange_of(d, k, ranks), wire_dtype(self.value_dtype, a.dtype)
        if exchange == "allgather":
            messages = yield AllGather(send(a, index, finite, wire))
        else:
            values = torch.where(finite, values, torch.nan)
            if exchange == "gtopk":
                (sums, places), taken = yield from butterfly(values, index, state)
                a[index] = torch.where(taken, 0, values)
            else:
                cap = capacity_of(k, ranks, self.capacity)
                (sums, places), taken, sent = yield from by_region(values, index, d, state, cap, wire)
                a[index] = torch.where(taken, values - sent.to(a.dtype), values)
            messages, wire = pack(torch.where(all_finite(sums), sums, torch.nan), places)[None], sums.dtype
        if self.error_feedback:
            stage_flat(bucket, state, a)
        state.verdict(deliver(bucket, messages, k, wire, ranks))
