"""What methods that send the largest entries share: options, selection, delivery, prices.

With P ranks, k pairs of 8 bytes, a seconds to start a message and b seconds per byte: the all-gather takes (P - 1)(a +
8 k b), the butterfly log2 P (a + 8 k b) if P is a power of two, the regions 2 (P - 1) a + (P - 1) 16 cap b.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_number
from thinwire.core.kernels.pairs import WIRES, average, message_bytes
from thinwire.core.kernels.seeding import generator
from thinwire.core.kernels.select import ALGORITHMS, keep_count, top_k
from thinwire.core.methods.base import Warmup, all_finite
from thinwire.core.methods.butterfly import rounds_of
from thinwire.core.methods.prices import ACCUMULATE, COPY, IN_PLACE, LINE_PASSES, WRITE, Prices
from thinwire.core.methods.regions import capacity_of
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Bucket, Scope, State, working_dtype


def check_options(density: Any, select: Any, value_dtype: Any, warmup: Any) -> None:
    check_number("density", density, above=0, most=1)
    check_choice("select", select, tuple(ALGORITHMS))
    check_choice("value_dtype", value_dtype, tuple(WIRES))
    if warmup is not None and not isinstance(warmup, Warmup):
        raise ValueError(f"warmup={warmup!r} must be a Warmup or None")


def message_units(kept: Iterable[int], wire: str) -> list[int]:
    """Return the sizes of messages of that many pairs each, in units of fp32 elements: 2 k for fp32 values."""
    return [message_bytes(k, WIRES[wire]) // 4 for k in kept]


def stays_dense(shape: Sequence[int], embedding: bool) -> bool:
    """Return True for vectors and embeddings: they are small, or sparse already."""
    return len(shape) < 2 or embedding


def check_size(bucket: Bucket) -> None:
    if bucket.numel > 2**31 - 1:
        raise ValueError(f"bucket {bucket.index} has {bucket.numel} elements; indices are int32: use smaller buckets")


def choose(
    a: Tensor, k: int, select: str, bucket: Bucket, state: State, options: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k entries of ``a`` ``[d]`` to send: values, indices, and whether all of ``a`` is finite."""
    draw = None if select == "exact" or a.device.type == "meta" else generator("select", bucket.index, state.step)
    values, indices = top_k(a, k, select, draw, **(options or {}))
    # "exact", and all on a GPU, put what is not finite first
    return values, indices, all_finite(values if select == "exact" or a.is_cuda else a)


def deliver(bucket: Bucket, messages: Tensor, k: int, wire: torch.dtype, ranks: int) -> Tensor:
    """Write the average of pairs, see :func:`~thinwire.core.kernels.pairs.average`; return its verdict.

    The sum is made in the gradient's own memory if its dtype allows.
    """
    dtype = working_dtype(bucket.dtype)
    direct = bucket.dtype == dtype
    out = bucket.blank() if direct else torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
    finite = average(out, messages, k, wire, ranks, bucket.scale if direct else None)
    if direct:
        bucket.write(out)
    else:
        bucket.write_gradient(out)
    return finite


EXCHANGES = ("allgather", "gtopk", "oktopk")
FEW_RANKS = 4  # up to here, without measurements, use the all-gather: little to gain otherwise, and no merges

# Passes per pair; an index is two elements.
_GATHER, _SCATTER, _STREAM = LINE_PASSES, 2 * LINE_PASSES, 3.0
_SORT, _FIND, _MERGE = 100.0, 200.0, 350.0  # relative to the memory's rate, for k = 10^4 to 10^5


def messages(exchange: str, k: int, ranks: int, wire: str, capacity: float) -> list[tuple[str, int]]:
    pairs = message_bytes(k, WIRES[wire])
    if exchange == "allgather":
        return [("AllGather", pairs)]
    if exchange == "oktopk":
        cap = capacity_of(k, ranks, capacity)
        return [
            ("AllToAll", ranks * message_bytes(cap, WIRES[wire])),
            ("AllGather", message_bytes(cap, WIRES["fp32"])),
        ]
    rounds, extra = rounds_of(ranks)
    fold = [("Exchange", pairs)] if extra else []
    return [*fold, *[("Exchange", pairs)] * rounds, *(("Exchange", size + k) for _, size in fold)]


def segments(
    exchange: str, size: int, kept: int, ranks: int, prices: Prices, *, feedback: bool, capacity: float
) -> list[float]:
    """Return seconds between the yields of :meth:`thinwire.methods.topk.TopK.reduce`, on a rank with the most work."""
    before = prices.passes(ACCUMULATE if feedback else COPY, size) + prices.select(size)
    before += prices.passes(_GATHER + 6 * _STREAM, kept)
    after = prices.passes(COPY + WRITE, size)  # the bucket's memory and the zeros in it
    after += prices.passes(_SCATTER, kept) if feedback else 0.0
    pairs = kept * ranks if exchange == "allgather" else kept
    if pairs < size:
        after += prices.passes(2 * _SCATTER + _GATHER + 6 * _STREAM, pairs)
    else:
        after += prices.passes(_SCATTER + 4 * _STREAM, pairs) + prices.passes(IN_PLACE, size)
    if exchange == "allgather":
        return [before, after]
    if exchange == "oktopk":
        boxes = ranks * capacity_of(kept, ranks, capacity)
        before += prices.passes(2 * _SORT + 4 * _SCATTER, kept)
        summed = -(-size // ranks)
        middle = prices.passes(_SCATTER, boxes) + prices.passes(WRITE, summed) + prices.select(summed)
        after += prices.passes(_SORT + _MERGE / 2, boxes) + prices.passes(_FIND, kept)
        return [before, middle, after]
    rounds, extra = rounds_of(ranks)
    before += prices.passes(_SORT, kept)
    if not rounds:
        return [before + after]
    merge = prices.passes(_MERGE, kept)
    merges = [merge] * (rounds + extra)
    return [before, *merges, after] if extra else [before, *merges[:-1], merge + after]


def seconds(exchange: str, k: int, ranks: int, costs: Costs, wire: str, capacity: float) -> float:
    moved = messages(exchange, k, ranks, wire, capacity)
    return sum(costs.seconds(kind, Scope.WORLD, ranks, size) for kind, size in moved)


def allowed(wire: str) -> tuple[str, ...]:
    """Return the exchanges allowed for a value dtype: merged sums are equal on both sides only in fp32."""
    return EXCHANGES if wire == "fp32" else tuple(e for e in EXCHANGES if e != "gtopk")


@lru_cache(maxsize=4096)
def assumed_cheapest(size: int, k: int, ranks: int, wire: str, capacity: float) -> str:
    """Return the exchange to use without measurements, from (size, k, ranks) alone, so equal on all ranks.

    Up to four ranks it is the all-gather; else the cheapest by the formulas for an assumed link of 1 Gbit/s and 50 us.
    """
    if ranks <= FEW_RANKS:
        return "allgather"
    costs = Costs.of_link(1e9, 50e-6, ranks, compute={})
    return min(allowed(wire), key=lambda e: seconds(e, k, ranks, costs, wire, capacity))


def cheapest(size: int, k: int, ranks: int, costs: Costs, wire: str, capacity: float) -> str:
    """Return the exchange whose messages and compute together take least time by these costs."""
    k, prices = k or keep_count(size, 1.0), Prices(costs, ranks)

    def total(exchange: str) -> float:
        compute = sum(segments(exchange, size, k, ranks, prices, feedback=True, capacity=capacity))
        return seconds(exchange, k, ranks, costs, wire, capacity) + compute

    return min(allowed(wire), key=total)
