"""HiTopK: the dense sum inside a node, the largest entries between nodes.

Paper: Shi et al.: Towards scalable distributed training of deep learning on public cloud clusters, MLSys 2021, arXiv
2010.10458 (HiTopKComm).

m nodes of n ranks, d elements. Reduce-scatter in the node: each rank holds S = ceil(d / n) elements of the node's sum,
its *shard*. A = shard + E; the k = floor(density S) largest entries go to the same shard of every other node, where
they are added. All-gather in the node. A rank sends 8 k bytes to each of m - 1 peers over its share of the network
card, and twice (n - 1) / n of the dense bytes inside the node.

Differences from the paper: E is in units of the sum, not divided by the number of ranks (equivalent); selection is
exact by default; received pairs are added and never overwrite one another; the rounding error of 16-bit values stays in
E; a rejected step leaves E unchanged, bit for bit. With one node it is the plain average, with one rank per node Top-k.

Each rank has residuals for its shard alone, kept as slices of the parameters. After a change of plan, or from a
checkpoint of another number of ranks, a slice may no longer be in this rank's shard. Then it is added to this rank's
gradient, and the node's sum takes it to the rank whose shard it is now. This needs no exchange of its own, and nothing
is lost. (A 16-bit gradient rounds it, once.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.kernels.pairs import average, send, wire_dtype
from thinwire.core.kernels.select import keep_count, top_k
from thinwire.core.methods.base import all_finite, check_fusion
from thinwire.core.methods.exchanges import padded
from thinwire.core.methods.prices import COPY, FINITE, IN_PLACE, LINE_PASSES, READ, WRITE, Prices, elements
from thinwire.core.methods.sparse import check_options, choose, message_units, stays_dense
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import (
    CROSS,
    NODE,
    AllGather,
    AllReduce,
    Bucket,
    Method,
    Program,
    ReduceScatter,
    Shapes,
    Slot,
    State,
    Topology,
    working_dtype,
)


def cuts(bucket: Bucket, begin: int, end: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yield the parts of [begin, end) of a bucket by slot: (slot, place after ``begin``, place in the slot, length)."""
    start = 0
    for slot in bucket.slots:
        low, high = max(begin, start), min(end, start + slot.numel)
        if low < high:
            yield slot, low - begin, low - start, high - low
        start += slot.numel


def in_place(state: State, slot: Slot, inside: int, length: int) -> Tensor | None:
    """Return the committed residual if it is of exactly this part of the slot."""
    found = state.slice_of(slot.name)
    return found[1] if found is not None and (found[0], found[1].numel()) == (inside, length) else None


def with_debts(bucket: Bucket, state: State, begin: int, end: int) -> Tensor:
    """Return ``bucket.flat`` plus this rank's residuals outside [begin, end), from an older plan or a checkpoint.

    The node's sum takes such a residual to the rank whose shard it is now; none of it stays here.
    """
    flat, start = bucket.flat, 0
    mine = {slot.name: (inside, length) for slot, _, inside, length in cuts(bucket, begin, end)}
    for slot in bucket.slots:
        found = state.slice_of(slot.name)
        if found is not None and found[1].numel() and (found[0], found[1].numel()) != mine.get(slot.name):
            offset, owed = found
            owed = owed if bucket.scale is None else owed * bucket.scale
            flat[start + offset : start + offset + owed.numel()].add_(owed)
            if slot.name not in mine:
                state.stage_slice(slot.name, 0, owed.new_empty(0))
        start += slot.numel
    return flat


@dataclass(frozen=True)
class HiTopK(Method):
    """Sum in the node, and send the largest entries to other nodes.

    Args:
        density: share of each shard that is sent to other nodes, in (0, 1].
        select: the selection algorithm, see :func:`thinwire.kernels.select.top_k`.
        select_options: its options.
        value_dtype: of the values between nodes: "fp32", "bf16" or "fp16"; inside a node, the gradient's own.
        fusion: MiB of dense gradient, "none", "single", a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "hitopk"
    has_residual: ClassVar[bool] = True
    start_steps: ClassVar[int] = 2
    shards: ClassVar[bool] = True
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # only useful if machines have several ranks
    unfit: ClassVar[Mapping[str, str]] = {"fsdp2": "machines"}
    collective = "three_phase"  # for the buckets that stay dense, which are small

    density: float
    select: str = "exact"
    select_options: Mapping[str, Any] | None = None
    value_dtype: str = "fp32"
    fusion: Any = "auto"

    def __post_init__(self) -> None:
        check_options(self.density, self.select, self.value_dtype, None)
        check_fusion(self.fusion)
        if self.fusion in ("optimal", "mgwfbp", "tune"):
            raise ValueError(
                f'fusion={self.fusion!r} has no price for two levels: use a number of MiB, "none", "single" or "auto"'
            )
        top_k(torch.zeros(1), 1, self.select, **(self.select_options or {}))  # an unknown option raises here

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """Return True for vectors and embeddings, as Top-k does."""
        return stays_dense(shape, embedding)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return what a node sends of each tensor to another node, in units of fp32 elements."""
        return message_units((keep_count(n, self.density) for n in super().payload(shapes, phase)), self.value_dtype)

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Copy into the bucket; shard and residual, select, zero what is sent, pack; add all nodes' pairs; deliver."""
        size, prices = elements(shapes), Prices(costs, topology.world_size)
        nodes, ranks = _grid(topology)
        if nodes == 1:
            return [prices.passes(COPY, size), prices.passes(FINITE, size)]
        shard = -(-size // ranks)
        kept = keep_count(shard, self.density)
        gather, scatter, stream = LINE_PASSES, 2 * LINE_PASSES, 3.0  # per pair, as for Top-k
        first = prices.passes(COPY + (COPY if size % ranks else 0.0), size)
        second = prices.passes(READ + IN_PLACE + FINITE, shard) + prices.select(shard)
        second += prices.passes(gather + scatter + 6 * stream, kept)
        third = prices.passes(WRITE + IN_PLACE, shard) + prices.passes(scatter + 4 * stream, kept * nodes)
        fourth = prices.passes(FINITE + COPY, size)
        return [first + second, third + fourth] if ranks == 1 else [first, second, third, fourth]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Reduce-scatter in the node, all-gather of pairs between nodes, all-gather in the node."""
        d = bucket.numel
        if d == 0:
            return
        nodes, ranks = _grid(state.topology)
        if nodes == 1:
            total = yield AllReduce(with_debts(bucket, state, 0, 0).div_(state.size))
            state.verdict(all_finite(total))
            bucket.write(total)
            return
        size = -(-d // ranks)
        if size > 2**31 - 1:
            raise ValueError(
                f"bucket {bucket.index}: shards of {size} elements; indices are int32: use smaller buckets"
            )
        begin = state.topology.local_rank(state.rank) * size
        half = bucket.dtype == torch.float16  # a node's sum must not overflow if the average does not
        flat = with_debts(bucket, state, begin, begin + size)
        if ranks > 1:
            shard = yield ReduceScatter(padded(flat.div_(ranks) if half else flat, ranks), NODE)
        else:
            shard = flat.clone()
        a = _unscaled(shard, bucket, ranks if half and ranks > 1 else 1)
        for slot, position, inside, length in cuts(bucket, begin, begin + size):
            if (owed := in_place(state, slot, inside, length)) is not None:
                a[position : position + length].add_(owed)
        k = keep_count(size, self.density)
        _, index, finite = choose(a, k, self.select, bucket, state, self.select_options)
        wire = wire_dtype(self.value_dtype, a.dtype)
        message = send(a, index, finite, wire)
        if begin >= d:  # the shard is only padding; each rank stages some residual, so that none seems lost
            state.stage_slice(bucket.slots[0].name, 0, a[:0])
        for slot, position, inside, length in cuts(bucket, begin, begin + size):
            state.stage_slice(slot.name, inside, a[position : position + length])
        parts = yield AllGather(message, CROSS)
        mean = torch.empty_like(a)
        average(mean, parts, k, wire, state.size)
        if bucket.scale is not None:
            mean.mul_(bucket.scale)
        whole = mean.to(bucket.dtype)
        if ranks > 1:
            whole = (yield AllGather(whole, NODE)).reshape(-1)
        state.verdict(all_finite(whole))  # over all shards: only here does every rank see them
        bucket.write(whole[:d])


def _grid(topology: Topology) -> tuple[int, int]:
    if not topology.uniform:
        raise ValueError(
            f"HiTopK needs the same number of ranks on every node, not {list(topology.layout)}: use "
            "TopK, which works with any layout"
        )
    return topology.nodes, topology.layout[0]


def _unscaled(shard: Tensor, bucket: Bucket, factor: int) -> Tensor:
    """Return the shard times ``factor``, unscaled, in the working dtype; in its own memory if possible."""
    a = shard.to(working_dtype(bucket.dtype))
    if factor != 1:
        a.mul_(factor)
    return a if bucket.scale is None else a.div_(bucket.scale)
