"""DGC: Top-k of the momentum-corrected gradient; the optimizer's momentum is applied before the selection.

Paper: Lin et al.: Deep gradient compression, ICLR 2018, arXiv 1712.01887. Exchange: all-gather of pairs, as in Top-k.

Per rank, with g the gradient, mu the momentum and V the residual:

    m <- mu m + g,  V <- V + m          (Nesterov: m <- mu (m + g), V <- V + m + g)
    sent: the k largest of V;  V = 0 there, and m = 0 (masking: old momentum is not sent twice)

Dense buckets, and density 1: the average of g, then m on the average; nothing is masked. Weight decay, in the form of
torch's SGD, gets a momentum of its own after the exchange: it is equal on all ranks and need not be sent.

So the optimizer must be SGD without momentum and weight decay, which ``attach`` checks.

Differences from the paper: clipping is per bucket, to clip / sqrt(P) of its local norm; warm-up stages are counted in
steps; V keeps the rounding error of 16-bit values; a rejected step leaves m and V unchanged, bit for bit; a bucket that
is sent whole is not masked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_flag, check_number
from thinwire.core.kernels.pairs import average, send, wire_dtype
from thinwire.core.kernels.select import keep_count
from thinwire.core.methods.base import Warmup, all_finite, check_fusion, poison
from thinwire.core.methods.prices import ACCUMULATE, COPY, FINITE, IN_PLACE, LINE_PASSES, Prices, elements
from thinwire.core.methods.sparse import (
    check_options,
    check_size,
    choose,
    deliver,
    message_units,
    segments,
    stays_dense,
)
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import (
    AllGather,
    AllReduce,
    Bucket,
    Method,
    Program,
    Shapes,
    Slot,
    State,
    Topology,
    working_dtype,
)

_MOMENTUM, _DECAY = "momentum", "decay"


@dataclass(frozen=True)
class DGC(Method):
    """Send the largest entries of accumulated momentum.

    Args:
        density: share of the elements that is sent, in (0, 1].
        momentum: mu, in [0, 1).
        nesterov: use Nesterov's form.
        weight_decay: as in ``torch.optim.SGD``; 0 in LocalWorld, which has no parameters.
        clip: largest norm of the gradient, over all ranks; None: no clipping.
        masking: forget the momentum of what is sent.
        select: the selection algorithm, see :func:`thinwire.kernels.select.top_k`.
        warmup: a :class:`~thinwire.methods.base.Warmup`, as in the published runs, or None.
        value_dtype: of the values as sent: "fp32", "bf16" or "fp16".
        fusion: MiB of dense gradient, "none", "single", "optimal", a published rule, a ``Merge`` or "auto".
    """

    name: ClassVar[str] = "dgc"
    has_residual: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    unfit: ClassVar[Mapping[str, str]] = {
        "local": "its momentum is for gradients, and the inner optimizer has its own; use topk",
        "fsdp2": "the optimizer's momentum",
        "federated": "it corrects an optimizer's momentum, and a client's change has none; use topk",
    }
    single_rank_note: ClassVar[str] = (
        ", without its momentum and weight decay, which the optimizer may have on one rank"
    )

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    masking: bool = True
    select: str = "threshold"
    warmup: Warmup | None = None
    value_dtype: str = "fp32"
    fusion: Any = "auto"

    def __post_init__(self) -> None:
        check_options(self.density, self.select, self.value_dtype, self.warmup)
        check_number("momentum", self.momentum, least=0, below=1)
        check_number("weight_decay", self.weight_decay, least=0)
        if self.clip is not None:
            check_number("clip", self.clip, least=0)
            if self.clip == 0:
                raise ValueError("clip=0 would erase every gradient; None does not clip")
        check_flag("nesterov", self.nesterov)
        check_flag("masking", self.masking)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        check_fusion(self.fusion, sparse=True)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """Return True for vectors and embeddings: they are small, or sparse already."""
        return stays_dense(shape, embedding)

    def dense_method(self) -> Method:
        """Return the same method at density 1: momentum on the average."""
        return dataclasses.replace(self, density=1.0)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``ValueError`` unless it is SGD without momentum and weight decay; these belong to the method here."""
        groups = optimizer.param_groups
        plain = isinstance(optimizer, torch.optim.SGD)
        if plain and not any(group["momentum"] or group["weight_decay"] for group in groups):
            return
        group = next((g for g in groups if plain and (g["momentum"] or g["weight_decay"])), groups[0])
        found = ", ".join(f"{key}={group[key]}" for key in ("momentum", "weight_decay") if key in group)
        raise ValueError(
            f"DGC has its own momentum and weight decay, and {type(optimizer).__name__}({found}) would add more: "
            f"replace it with torch.optim.SGD(model.parameters(), lr={float(group['lr']):g}) and pass these two to DGC"
        )

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        """Return each tensor's message in units of fp32 elements: 2 k for fp32 pairs."""
        sizes = super().payload(shapes, phase)
        if self.density == 1:
            return sizes
        return message_units((keep_count(size, self.density) for size in sizes), self.value_dtype)

    def kept(self, d: int, step: int) -> int:
        """Return the number of entries sent for a bucket of ``d`` elements at a step."""
        return keep_count(d, self.density if self.warmup is None else self.warmup.density(self.density, step))

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Costs) -> list[float]:
        """Do as Top-k, and the momentum; at density 1, as S-SGD and the momentum. For the density after the warm-up."""
        size, ranks = elements(shapes), topology.world_size
        prices = Prices(costs, ranks)
        once = ACCUMULATE + (IN_PLACE if self.nesterov else 0.0)
        clipped = prices.passes(FINITE + COPY, size) if self.clip is not None else 0.0
        decayed = prices.passes(2 * ACCUMULATE, size) if self.weight_decay else 0.0
        if self.density == 1:
            return [prices.passes(COPY, size) + clipped, prices.passes(FINITE + once + COPY, size) + decayed]
        kept = keep_count(size, self.density)
        before, after = segments("allgather", size, kept, ranks, prices, feedback=True, capacity=1.0)
        before += prices.passes(once, size) + clipped
        if self.masking:
            before += prices.passes(2 * LINE_PASSES, kept)
        return [before, after + prices.passes(COPY, size) + decayed]

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-gather of pairs; at density 1, one all-reduce."""
        if bucket.numel == 0:
            return
        if self.density == 1:
            yield from self.averaged(bucket, state)
        else:
            yield from self.selected(bucket, state)

    def selected(self, bucket: Bucket, state: State) -> Program:
        """Run the sparse program: each rank applies its own momentum before the exchange."""
        check_size(bucket)
        d = bucket.numel
        k = min(d, bucket.kept) or self.kept(d, state.step)
        m, v = state.spare(bucket.slots, _MOMENTUM), state.spare(bucket.slots)
        factor, slots = self._factor(bucket, state), bucket.slots
        m_pieces, v_pieces = bucket.split(m), bucket.split(v)
        if m.device.type != "meta":
            g = [slot.gradient() if factor is None else slot.gradient() * factor for slot in slots]
            self._push([state.local(_MOMENTUM, slot) for slot in slots], g, m_pieces)
            _add([state.residual(slot) for slot in slots], m_pieces, v_pieces)
            if self.nesterov:
                torch._foreach_add_(v_pieces, g)
        for slot, m_piece, v_piece in zip(slots, m_pieces, v_pieces):
            state.stage(slot.name, residual=v_piece, local={_MOMENTUM: m_piece})
        _, index, finite = choose(v, k, self.select, bucket, state)
        wire = wire_dtype(self.value_dtype, v.dtype)
        messages = yield AllGather(send(v, index, finite, wire))
        if self.masking and k < d:
            m[index] = 0
        if self.weight_decay:
            mean = torch.empty_like(v)
            state.verdict(average(mean, messages, k, wire, state.size))
            self._deliver(bucket, mean, state)
        else:
            state.verdict(deliver(bucket, messages, k, wire, state.size))

    def averaged(self, bucket: Bucket, state: State) -> Program:
        """Run the dense program: momentum on the average, as in a single worker's SGD."""
        g, factor = bucket.gradient(), self._factor(bucket, state)
        if factor is not None:
            g = g * factor
        mean = yield AllReduce(g.div_(state.size))
        finite = all_finite(mean)
        state.verdict(finite)
        m = state.spare(bucket.slots, _MOMENTUM)
        pieces = bucket.split(m)
        if m.device.type != "meta":
            self._push([state.local(_MOMENTUM, slot) for slot in bucket.slots], bucket.split(mean), pieces)
        for slot, piece in zip(bucket.slots, pieces):
            state.stage(slot.name, local={_MOMENTUM: piece})
        update = mean + m if self.nesterov else m.clone()
        self._deliver(bucket, update.mul_(poison(finite, 1.0, m.dtype)), state)

    def _push(self, old: list[Tensor], g: list[Tensor], out: list[Tensor]) -> None:
        if self.nesterov:
            _add(old, g, out)
            torch._foreach_mul_(out, self.momentum)
        else:
            _add(g, old, out, self.momentum)

    def _factor(self, bucket: Bucket, state: State) -> Tensor | None:
        """Return clipping's factor for this rank's gradients; the product is NaN if they are not finite."""
        if self.clip is None or bucket.device.type == "meta":
            return None
        norm = torch.stack([torch.linalg.vector_norm(slot.gradient()) for slot in bucket.slots]).norm()
        limit: float = self.clip / math.sqrt(state.size)
        return torch.clamp(limit / (norm + 1e-6), max=1.0)

    def _deliver(self, bucket: Bucket, update: Tensor, state: State) -> None:
        if self.weight_decay:
            for slot, piece in zip(bucket.slots, bucket.split(update)):
                out = state.spare([slot], _DECAY).view(slot.shape)
                state.stage(slot.name, local={_DECAY: out})
                if out.device.type == "meta":
                    continue
                decay = _weight(slot) * self.weight_decay
                self._push([state.local(_DECAY, slot)], [decay], [out])
                piece.add_(out + decay if self.nesterov else out)
        bucket.write_gradient(update)


def _add(x: list[Tensor], y: list[Tensor], out: list[Tensor], factor: float = 1.0) -> None:
    """Compute out = x + factor y for each; on a CPU singly, in one pass over memory instead of two."""
    if out[0].device.type == "cpu":
        for one, other, piece in zip(x, y, out):
            torch.add(one, other, alpha=factor, out=piece)
    else:
        torch._foreach_copy_(out, x)
        torch._foreach_add_(out, y, alpha=factor)


def _weight(slot: Slot) -> Tensor:
    if slot.weight is None:
        raise ValueError("weight_decay needs the parameters, which are not available here: use DGC(weight_decay=0)")
    return slot.weight.detach().to(working_dtype(slot.dtype))
