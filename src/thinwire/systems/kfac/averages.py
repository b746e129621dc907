"""The running averages of factors: new statistics are added where they are finite and some rank has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.finite import each_finite
from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.tables import BLOCK, alike, table

if TYPE_CHECKING:
    import triton.language as tl


def _renewed(
    sums: list[Tensor], counts: Tensor, olds: list[Tensor], updates: Tensor, keep: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return ``keep old + (1 - keep) sum / count`` of each, old where that is not usable, and the numbers of updates.

    ``counts``: of the ranks that had a statistic; ``updates``, ``keep``: as many, ``[len(sums)]``.
    """
    usable = (counts > 0) & each_finite(sums)
    factors = [
        torch.where(fit, share * old + (1 - share) * (x / count), old)
        for x, count, old, share, fit in zip(sums, counts.clamp(min=1), olds, keep, usable)
    ]
    return factors, updates + usable


@Kernel
def finite_kernel(rows, broken, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * 7
    size, x = tl.load(row + 3), tl.load(row + 4).to(tl.pointer_type(tl.float32))
    found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found += tl.where(tl.abs(tl.load(x + at, at < size, 0.0)) < float("inf"), 0, 1)
    tl.store(broken + tl.program_id(0), tl.sum(found))


@Kernel
def renew_kernel(rows, broken, counts, updates, keep, after, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * 7
    owner, first, parts, size = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    x, old = tl.load(row + 4).to(tl.pointer_type(tl.float32)), tl.load(row + 5).to(tl.pointer_type(tl.float32))
    new = tl.load(row + 6).to(tl.pointer_type(tl.float32))
    faults = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, parts, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        faults += tl.load(broken + first + at, at < parts, 0)
    count, share = tl.load(counts + owner), tl.load(keep + owner)
    usable = (count > 0) & (tl.sum(faults) == 0)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        held, given = tl.load(old + at, at < size), tl.load(x + at, at < size)
        mixed = share * held + (1 - share) * (given / tl.maximum(count, 1.0))
        tl.store(new + at, tl.where(usable, mixed, held), at < size)
    if tl.program_id(0) == first:
        tl.store(after + owner, tl.load(updates + owner) + tl.where(usable, 1.0, 0.0))


@fused(_renewed, lambda sums, counts, olds, *_: alike(sums, olds))
def renewed(
    sums: list[Tensor], counts: Tensor, olds: list[Tensor], updates: Tensor, keep: Tensor
) -> tuple[list[Tensor], Tensor]:
    factors = [torch.empty_like(old) for old in olds]
    where = table(sums, olds, factors)
    broken = torch.empty(where.programs, dtype=torch.int32, device=counts.device)
    after = torch.empty_like(updates)
    finite_kernel(where.programs, where.rows, broken, BLOCK=BLOCK)
    renew_kernel(where.programs, where.rows, broken, counts, updates, keep, after, BLOCK=BLOCK)
    return factors, after
