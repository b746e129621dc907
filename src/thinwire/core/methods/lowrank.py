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
from thinwire.core.kernels.lowrank import fingerprint, orthogonalise, rebuild
from thinwire.core.kernels.seeding import normal
from thinwire.core.methods.base import check_fusion, own_memory
from thinwire.core.methods.prices import elements
from thinwire.core.program import AllGather, Broadcast, Bucket, Method, Slot, State, working_dtype


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

    def basis(self, field: str, slot: Slot, state: State) -> Tensor:
        """Return the orthonormal factor ``p`` [n, r] or ``q`` [m, r] of a parameter: committed, else from the seed.

        ``p`` needs a start value too: after a rejected step 0 it is the first factor to be used.
        """
        rank, n = self.rank_of(slot.shape), slot.shape[0]
        rows = n if field == "p" else slot.numel // n
        found = state.shared(field, slot.name)
        if found is not None and found.shape == (rows, rank):
            return found
        words = (self.seed, slot.name) if field == "q" else (self.seed, slot.name, field)
        return orthogonalise(normal(rows, rank, *words, dtype=working_dtype(slot.dtype), device=slot.device))


def common(method: LowRank, bases: Sequence[Tensor], state: State) -> Generator[Any, Tensor, list[Tensor]]:
    """Return bases that are equal on all ranks to the last bit, which processors of different kinds would not make."""
    if not method.bases_from_first or state.size == 1:
        return list(bases)
    first = yield Broadcast(torch.cat([basis.reshape(-1) for basis in bases]))
    pieces = first.split([basis.numel() for basis in bases])
    return [piece.view(basis.shape) for piece, basis in zip(pieces, bases)]


def pack(factors: Sequence[Tensor], dense: Sequence[Slot] = (), ranks: int = 1) -> Tensor:
    """Return one message, a copy: the factors, then the dense gradients over ``ranks`` (as ``average_flat`` sends)."""
    message = torch.cat([x.reshape(-1) for x in factors] + [slot.gradient().reshape(-1) for slot in dense])
    if dense:
        begin = sum(x.numel() for x in factors)
        message[begin:].mul_(1.0 / ranks)
        for slot in dense:
            if slot.value is not None:
                message[begin : begin + 1].add_(0.0)  # not -0.0, which means that no rank used it
            begin += slot.numel
    return message


def unpack(total: Tensor, factors: Sequence[Tensor], dense: Sequence[Slot] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Split a message of ``pack``: views of the received message, in the shapes of what was sent."""
    pieces = torch.split(total, [x.numel() for x in factors] + [slot.numel for slot in dense])
    return [piece.view(x.shape) for piece, x in zip(pieces, factors)], list(pieces[len(factors) :])


def write_product(slot: Slot, left: Tensor, right: Tensor) -> None:
    """Deliver ``left @ right.mT``, [n, r] and [m, r]; in the gradient's own memory if units and dtype allow it."""
    target = own_memory(slot)
    if target is not None:
        rebuild(left, right, out=target.view(left.shape[0], right.shape[0]))
    else:
        slot.write(left @ right.mT)


def verify_bases(
    method: LowRank, slots: Sequence[Slot], bases: Sequence[Tensor], state: State, step: int
) -> Generator[Any, Tensor, None]:
    """Compare bases over the ranks from time to time, bit for bit: 8 bytes per tensor. Not done in simulations."""
    every = method.verify_every
    due = every > 0 and (step == state.start + 1 or (step > 0 and step % every == 0))
    if not due or state.size == 1 or bases[0].device.type == "meta":
        return
    hashes = yield AllGather(torch.stack([fingerprint(basis) for basis in bases]))
    differs = (hashes != hashes[:1]).any(0).tolist()
    names = [slot.name for slot, bad in zip(slots, differs) if bad]
    if names:
        raise RuntimeError(
            f"the bases of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} differ between ranks at "
            f"step {step}: mixed hardware (pass bases_from_first=True), different library versions, or a rank that "
            "lost a step"
        )
