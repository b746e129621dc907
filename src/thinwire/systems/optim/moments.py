"""LAMB's first pass over memory: both moments and the update that they give; on a GPU also what its norms need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.tables import BLOCK, alike, table
from thinwire.systems.optim.norms import norms, squares

if TYPE_CHECKING:
    import triton.language as tl


def _shrinkage(gradients: list[Tensor], limit: float) -> Tensor:
    """Return the divisor of the gradients: ``max(1, |g_all| / limit)``, 0-dim."""
    total: Tensor = torch.linalg.vector_norm(norms(gradients))
    return (total / limit).clamp(min=1.0)


@Kernel
def shrinkage_kernel(squares, count, limit, shrink, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(squares + at, at < count, 0.0)
    times = tl.sqrt(tl.sum(total)).to(tl.float32) / limit
    tl.store(shrink, tl.where(times < 1, 1.0, times))  # NaN stays


@fused(_shrinkage, lambda gradients, limit: alike(gradients))
def shrinkage(gradients: list[Tensor], limit: float) -> Tensor:
    found = squares(table(gradients))
    shrink = torch.empty((), device=found.device)
    shrinkage_kernel(1, found, len(found), limit, shrink, BLOCK=BLOCK)
    return shrink


@dataclass(frozen=True)
class Adam:
    """A step of Adam's: rates of the moments, and the number of this step, from 1 on."""

    beta1: float
    beta2: float
    eps: float
    step: float

    @property
    def corrections(self) -> tuple[float, float]:
        """Factor of and addend to ``sqrt(v)`` in the denominator, for moments that begin at 0: saves a pass."""
        first = 1 - self.beta1**self.step
        return first / (1 - self.beta2**self.step) ** 0.5, first * self.eps


def _moments(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    shrink: Tensor | None, sign: float, decay: float, by: Adam,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Advance the moments by ``sign gradient / shrink``; return u of each tensor, and what ``squares`` is of both.

    The squares are None where they would take a pass of their own.
    """
    if sign < 0:
        gradients = list(torch._foreach_neg(gradients))
    if shrink is not None:
        gradients = list(torch._foreach_div(gradients, shrink))
    torch._foreach_lerp_(first, gradients, 1 - by.beta1)
    torch._foreach_mul_(second, by.beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - by.beta2)
    below = torch._foreach_sqrt(second)
    factor, addend = by.corrections
    torch._foreach_mul_(below, factor)
    torch._foreach_add_(below, addend)
    updates = list(torch._foreach_div(first, below))
    if decay:
        torch._foreach_add_(updates, weights, alpha=decay)
    return updates, None


@Kernel
def moments_kernel(  # type: ignore[no-untyped-def]
    rows, shrink, squares, sign, decay, beta1, beta2, factor, addend, SHRINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0) * 9
    size = tl.load(row + 3)
    w, g = tl.load(row + 4).to(tl.pointer_type(tl.float32)), tl.load(row + 5).to(tl.pointer_type(tl.float32))
    m, v = tl.load(row + 6).to(tl.pointer_type(tl.float32)), tl.load(row + 7).to(tl.pointer_type(tl.float32))
    u = tl.load(row + 8).to(tl.pointer_type(tl.float32))
    scale = sign
    if SHRINK:
        scale = sign / tl.load(shrink)
    mine, others = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < size
        weight, gradient = tl.load(w + at, inside, 0.0), scale * tl.load(g + at, inside, 0.0)
        held = tl.load(m + at, inside, 0.0)
        held += (1 - beta1) * (gradient - held)
        large = beta2 * tl.load(v + at, inside, 0.0) + (1 - beta2) * gradient * gradient
        update = held / (tl.sqrt(large) * factor + addend) + decay * weight
        tl.store(m + at, held, inside)
        tl.store(v + at, large, inside)
        tl.store(u + at, update, inside)
        mine += weight * weight
        others += tl.where(inside, update * update, 0.0)
    tl.store(squares + tl.program_id(0) * 2, tl.sum(mine.to(tl.float64)))
    tl.store(squares + tl.program_id(0) * 2 + 1, tl.sum(others.to(tl.float64)))


@fused(_moments, lambda w, g, m, v, *_: alike(w, g, m, v))
def moments(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor],
    shrink: Tensor | None, sign: float, decay: float, by: Adam,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Take one pass; 28 bytes an element."""
    updates = [torch.empty_like(w) for w in weights]
    where = table(weights, gradients, first, second, updates)
    found = where.rows.new_empty(where.programs, 2, dtype=torch.float64)
    if where.programs:
        moments_kernel(
            where.programs, where.rows, where.rows if shrink is None else shrink, found, sign, decay, by.beta1,
            by.beta2, *by.corrections, SHRINK=shrink is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return updates, found
