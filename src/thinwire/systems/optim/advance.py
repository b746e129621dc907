"""The last pass of LARS and LAMB over memory: momentum and weights, with a rate for each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.tables import BLOCK, alike, table

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Advance:
    """``v <- momentum v + gain ratio (sign g + decay w);  w <- w - rate v``, or ``- rate (momentum v + the new part)``.

    Without momentum, v is the new part alone.
    """

    gain: float
    sign: float
    decay: float
    momentum: float
    nesterov: bool
    rate: float


def _advance(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    ratios: Tensor | None,
    by: Advance,
) -> None:
    """Advance weights and buffers (none without momentum); ``ratios``: ``[len(weights)]``, None: 1."""
    rates: list[Tensor] | float = by.gain * by.sign
    decay: list[Tensor] | None = None
    if ratios is not None:
        shares = ratios * by.gain if by.gain != 1 else ratios
        rates = list((shares * by.sign).unbind())
        decay = list((shares * by.decay).unbind()) if by.decay else None
    if by.momentum and not by.nesterov:  # directly into v: saves a pass over memory
        torch._foreach_mul_(buffers, by.momentum)
        if isinstance(rates, float):
            torch._foreach_add_(buffers, gradients, alpha=rates)
        else:
            torch._foreach_addcmul_(buffers, gradients, rates)
        if decay is not None:
            torch._foreach_addcmul_(buffers, weights, decay)
        torch._foreach_add_(weights, buffers, alpha=-by.rate)
        return
    step = list(torch._foreach_mul(gradients, rates))
    if decay is not None:
        torch._foreach_addcmul_(step, weights, decay)
    if by.momentum:
        torch._foreach_mul_(buffers, by.momentum)
        torch._foreach_add_(buffers, step)
        torch._foreach_add_(step, buffers, alpha=by.momentum)
    torch._foreach_add_(weights, step, alpha=-by.rate)


@Kernel
def advance_kernel(  # type: ignore[no-untyped-def]
    rows, ratios, gain, sign, decay, momentum, rate, RATIOS: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0) * (7 if MOMENTUM else 6)
    size = tl.load(row + 3)
    w, g = tl.load(row + 4).to(tl.pointer_type(tl.float32)), tl.load(row + 5).to(tl.pointer_type(tl.float32))
    share = gain
    if RATIOS:
        share = gain * tl.load(ratios + tl.load(row))
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < size
        weight = tl.load(w + at, inside, 0.0)
        step = share * sign * tl.load(g + at, inside, 0.0) + share * decay * weight
        if MOMENTUM:
            v = tl.load(row + 6).to(tl.pointer_type(tl.float32))
            held = momentum * tl.load(v + at, inside, 0.0) + step
            tl.store(v + at, held, inside)
            step = step + momentum * held if NESTEROV else held
        tl.store(w + at, weight - rate * step, inside)


@fused(_advance, lambda weights, gradients, buffers, *_: alike(weights, gradients, buffers or weights))
def advance(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    ratios: Tensor | None,
    by: Advance,
) -> None:
    where = table(weights, gradients, *([buffers] if buffers else []))
    if where.programs:
        advance_kernel(
            where.programs, where.rows, where.rows if ratios is None else ratios, by.gain, by.sign, by.decay,
            by.momentum, by.rate, RATIOS=ratios is not None, MOMENTUM=bool(buffers), NESTEROV=by.nesterov, BLOCK=BLOCK,
        )  # fmt: skip


def _step(weights: list[Tensor], updates: list[Tensor], ratios: Tensor | None, rate: float) -> None:
    """Compute ``w <- w - rate ratio u``; no ratios: 1."""
    if ratios is None:
        torch._foreach_add_(weights, updates, alpha=-rate)
    else:
        torch._foreach_addcmul_(weights, updates, list((ratios * -rate).unbind()))


@fused(_step, lambda weights, updates, *_: alike(weights, updates))
def step(weights: list[Tensor], updates: list[Tensor], ratios: Tensor | None, rate: float) -> None:
    advance.launch(weights, updates, [], ratios, Advance(rate, 1.0, 0.0, 0.0, False, 1.0))
