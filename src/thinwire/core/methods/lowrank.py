"""What ACP-SGD and Power-SGD share: which tensors are compressed, seeded bases, packing, delivery.

A gradient counts as the matrix n x m, n = shape[0], m = numel / n, in logical order. Everything else is sent dense in
the same message. Factors, residuals and orthogonalisation are fp32 (fp64 for fp64 gradients).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_count, check_flag, check_number
from thinwire.core.kernels.lowrank import fingerprint, rebuild
from thinwire.core.kernels.orthogonal import orthogonalise, views
from thinwire.core.kernels.seeding import normal
from thinwire.core.methods.base import accumulate_all, check_fusion, poison
from thinwire.core.methods.prices import elements
from thinwire.core.program import AllGather, Broadcast, Bucket, Method, Slot, State, working_dtype
from thinwire.core.program.bucket import LARGE_ON_CARD, deliver, stacked


@dataclass(frozen=True)
class LowRank(Method):
    """The options of the low-rank methods; see :class:`~thinwire.methods.acp.ACP`."""

    has_residual: ClassVar[bool] = True
    start_steps: ClassVar[int] = 2
    bucket_unit: ClassVar[str] = "payload"
    factors: ClassVar[float] = 1.0  # share of r (n + m) elements that one step sends

    rank: int = 4
    compress: str = "paying"
    min_rate: float = 2.0
    error_feedback: bool = True
    seed: int = 0
    verify_every: int = 1000
    fusion: Any = "auto"
    deterministic: bool = False
    bases_from_first: bool = False

    def __post_init__(self) -> None:
        check_count("rank", self.rank, 1)
        check_choice("compress", self.compress, ("paying", "matrices"))
        check_number("min_rate", self.min_rate, least=0)
        check_flag("error_feedback", self.error_feedback)
        check_count("seed", self.seed, 0)
        check_count("verify_every", self.verify_every, 0)
        check_fusion(self.fusion)
        check_flag("deterministic", self.deterministic)
        check_flag("bases_from_first", self.bases_from_first)
        if not self.error_feedback:
            object.__setattr__(self, "has_residual", False)

    def on_mixed_processors(self) -> LowRank:
        return replace(self, bases_from_first=True)

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the rank at which a tensor of this shape is compressed; 0: it stays dense."""
        size = math.prod(shape)
        if len(shape) < 2 or size == 0:
            return 0
        n = int(shape[0])
        m = size // n
        if self.compress == "matrices":
            return min(self.rank, n, m)
        pays = self.rank * (n + m) * self.factors * self.min_rate < size
        return self.rank if self.rank < min(n, m) and pays else 0

    def sums(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape is not compressed."""
        return not self.rank_of(shape)

    def sort(self, bucket: Bucket) -> tuple[list[Slot], list[Slot]]:
        """Return the bucket's compressed slots, and its dense ones."""
        low = [slot for slot in bucket.slots if self.rank_of(slot.shape)]
        return low, [slot for slot in bucket.slots if not self.rank_of(slot.shape) and slot.numel]

    def matrices(self, shapes: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, int]], int]:
        """Return (n, m, rank) of the compressed tensors, and the number of elements of the others."""
        low = [shape for shape in shapes if self.rank_of(shape)]
        sizes = [(int(shape[0]), math.prod(shape) // int(shape[0]), self.rank_of(shape)) for shape in low]
        return sizes, elements(shapes) - elements(low)

    def batches(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        """Return slots whose matrices go through one call: on a GPU small ones of one shape, else each alone.

        Nor are sums in rank order batched, whose bits must not depend on what else is in the bucket.
        """
        groups: dict[tuple[Any, ...], list[Slot]] = {}
        for slot in slots:
            alone = self.deterministic or slot.device.type != "cuda" or slot.numel >= LARGE_ON_CARD
            groups.setdefault((slot.name,) if alone else (slot.shape[0], slot.numel), []).append(slot)
        return list(groups.values())

    def matrices_of(self, batches: Sequence[Sequence[Slot]], state: State) -> list[Tensor]:
        """Return the matrices of each batch, [b, n, m]: A = M + E, staged as the residual, or else the gradient."""
        shapes = [(len(batch), batch[0].shape[0], batch[0].numel // batch[0].shape[0]) for batch in batches]
        if not self.error_feedback:
            return [stacked([slot.gradient() for slot in batch]).view(shape) for batch, shape in zip(batches, shapes)]
        slots = [slot for batch in batches for slot in batch]
        flat = state.spare(slots)
        residuals = views(flat, [slot.shape for slot in slots])
        accumulate_all(slots, state, residuals)
        for slot, residual in zip(slots, residuals):
            state.stage(slot.name, residual=residual)
        return views(flat, shapes)

    def bases(self, field: str, batch: Sequence[Slot], state: State) -> Tensor:
        """Return the orthonormal factors ``p`` [b, n, r] or ``q`` [b, m, r] of a batch: committed, else from seeds.

        ``p`` needs a start value too: after a rejected step 0 it is the first factor to be used.
        """
        _, *shape = self.factors_of(field, batch)
        found = [state.shared(field, slot.name) for slot in batch]
        return stacked(
            [
                self._first(field, slot, shape) if x is None or [*x.shape] != shape else x
                for slot, x in zip(batch, found)
            ]
        )

    def factors_of(self, field: str, batch: Sequence[Slot]) -> tuple[int, int, int]:
        """Return the shape of a batch's factors."""
        rows = batch[0].shape[0]
        return len(batch), rows if field == "p" else batch[0].numel // rows, self.rank_of(batch[0].shape)

    def _first(self, field: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        words = (self.seed, slot.name) if field == "q" else (self.seed, slot.name, field)
        return orthogonalise(normal(*shape, *words, dtype=working_dtype(slot.dtype), device=slot.device))


def stage(state: State, field: str, batches: Sequence[Sequence[Slot]], factors: Sequence[Tensor]) -> None:
    for batch, some in zip(batches, factors):
        for slot, factor in zip(batch, some):
            state.stage(slot.name, shared={field: factor})


def common(method: LowRank, bases: Sequence[Tensor], state: State) -> Generator[Any, Tensor, list[Tensor]]:
    """Return bases that are equal on all ranks to the last bit, which processors of different kinds would not make."""
    if not method.bases_from_first or state.size == 1:
        return list(bases)
    first = yield Broadcast(torch.cat([basis.reshape(-1) for basis in bases]))
    return views(first, [basis.shape for basis in bases])


def room(shapes: Sequence[Sequence[int]], dense: Sequence[Slot], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return memory for a message, and in it that of factors of these shapes; the dense gradients come after them."""
    size = sum(torch.Size(shape).numel() for shape in shapes) + sum(slot.numel for slot in dense)
    message = like.new_empty(size)
    return message, views(message, shapes)


def put_dense(message: Tensor, dense: Sequence[Slot], ranks: int) -> None:
    """Put dense gradients, over ``ranks`` (as ``average_flat`` sends), at the end of a message."""
    if not dense or message.device.type == "meta":
        return
    tail = message[-sum(slot.numel for slot in dense) :]
    pieces = views(tail, [slot.shape for slot in dense])
    torch._foreach_copy_(pieces, [slot.value_or_zeros() for slot in dense])
    if (scale := dense[0].scale) is not None:
        tail.div_(scale)
    tail.mul_(1.0 / ranks)
    # not -0.0, which means that no rank used it
    if used := [piece.view(-1)[:1] for slot, piece in zip(dense, pieces) if slot.value is not None]:
        torch._foreach_add_(used, 0.0)


def write_dense(total: Tensor, dense: Sequence[Slot], finite: Tensor) -> None:
    """Deliver what ``put_dense`` has sent, in its memory."""
    if dense:
        tail = total[-sum(slot.numel for slot in dense) :]
        factor = poison(finite, 1.0, total.dtype)
        tail.mul_(factor if dense[0].scale is None else factor * dense[0].scale)
        deliver(dense, views(tail, [slot.shape for slot in dense]))


def write_means(batches: Sequence[Sequence[Slot]], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    """Deliver ``left @ right.mT`` of each batch; alone, in the gradient's own memory if dtype and strides allow it."""
    slots: list[Slot] = []
    pieces: list[Tensor] = []
    for batch, left, right in zip(batches, lefts, rights):
        shape = len(batch), left.shape[1], right.shape[1]
        target = batch[0].value if batch[0].result is None else batch[0].result
        if len(batch) == 1 and target is not None and target.dtype == left.dtype and target.is_contiguous():
            batch[0].result = target
            rebuild(left, right, target.view(shape))
            continue
        made = left.new_empty(shape)
        rebuild(left, right, made)
        slots += batch
        pieces += made
    if slots:
        deliver(slots, pieces)


def divisor(finite: Tensor, slot: Slot, ranks: int) -> Tensor:
    """Return by what to divide sums over ranks for the average in gradient units; NaN if the verdict is False."""
    found = poison(finite, ranks, working_dtype(slot.dtype))
    return found if slot.scale is None else found / slot.scale


def verify_bases(
    method: LowRank, batches: Sequence[Sequence[Slot]], bases: Sequence[Tensor], state: State, step: int
) -> Generator[Any, Tensor, None]:
    """Compare bases over the ranks from time to time, bit for bit: 8 bytes per tensor. Not done in simulations."""
    every = method.verify_every
    due = every > 0 and (step == state.start + 1 or (step > 0 and step % every == 0))
    if not due or state.size == 1 or bases[0].device.type == "meta":
        return
    hashes = yield AllGather(torch.stack([fingerprint(basis) for batch in bases for basis in batch]))
    differs = (hashes != hashes[:1]).any(0).tolist()
    slots = [slot for batch in batches for slot in batch]
    names = [slot.name for slot, bad in zip(slots, differs) if bad]
    if names:
        raise RuntimeError(
            f"the bases of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} differ between ranks at "
            f"step {step}: mixed hardware (pass bases_from_first=True), different library versions, or a rank that "
            "lost a step"
        )
