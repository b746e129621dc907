"""Ternary codec: -1, 0 or 1, drawn so that the mean over draws is the element, in units of a shared scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.quantise.blocks import piece, rounded_at_random

if TYPE_CHECKING:
    import triton.language as tl


def magnitudes(tensors: Sequence[Tensor], clip: float | None) -> Tensor:
    """Return max|a| of each tensor, at most ``clip`` times its root mean square; NaN or infinite if any element is."""
    if tensors[0].device.type == "meta":
        return tensors[0].new_empty(len(tensors))
    if tensors[0].is_cuda:
        top = torch.stack(torch._foreach_norm([*tensors], torch.inf))
    else:  # many times as fast as the norm
        low, high = (torch.stack(ends) for ends in zip(*map(torch.aminmax, tensors)))
        top = torch.maximum(-low, high)
    if clip is None:
        return top
    factors = [clip / a.numel() ** 0.5 for a in tensors]
    limit = torch.stack(torch._foreach_mul(torch._foreach_norm([*tensors]), factors))
    return torch.where(limit > 0, torch.minimum(top, limit), top)  # no limit if all squares underflow to 0


def _ternary(a: Tensor, own: Tensor, shared: Tensor, owner: Tensor, noise: Tensor) -> Tensor:
    """Clamp ``a`` to +-``own``; return int8 codes -1, 0, 1 whose mean over draws is a / ``shared``.

    ``own`` and ``shared`` are ``[T]``; ``owner``, int32, says which of them a row has, ``[rows]``; ``noise`` is as for
    ``blocks.encode``.
    """
    codes = torch.empty(a.numel(), dtype=torch.int8, device=a.device)
    if a.device.type == "meta":
        return codes
    width = a.numel() // owner.numel()
    size = piece(width, a.device)
    pieces = [torch.split(t, size) for t in (a, noise, codes)]
    tops = [torch.split(t.index_select(0, owner)[:, None], size // width) for t in (own, shared)]
    for x, part, out, most, top in zip(*pieces, *tops):
        level = torch.clamp(x.view(-1, width), -most, most).div_(top.masked_fill(top == 0, 1))
        out.copy_(rounded_at_random(level, 1, part).view(-1)).sub_(1)
    return codes


def _ternary_values(out: Tensor, codes: Tensor, shared: Tensor, owner: Tensor, divisor: Tensor) -> Tensor:
    """Fill ``out`` [n] with what int8 codes, or sums of them, stand for, divided by ``divisor``."""
    if out.device.type != "meta":
        out.copy_(codes).view(len(owner), -1).mul_(shared.index_select(0, owner)[:, None])
        out.div_(divisor)
    return out


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LAUNCH = {"TILE": 1 << 11, "num_warps": 8, "enable_fp_fusion": False}


@Kernel
def ternary_kernel(  # type: ignore[no-untyped-def]
    a, own, shared, owner, noise, codes, n, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mine = tl.load(owner + at // WIDTH, at < n, 0)
    most, top = tl.load(own + mine), tl.load(shared + mine)
    level = tl.div_rn(tl.clamp(tl.load(a + at, at < n, 0.0), -most, most), tl.where(top == 0, 1.0, top))
    level += tl.load(noise + at, at < n, 0).to(tl.float32) * 1.52587890625e-05
    code = tl.clamp(level + (1.5 + 7.62939453125e-06), 0.0, 2.0).to(tl.int32) - 1
    tl.store(codes + at, code.to(tl.int8), at < n)


@Kernel
def ternary_values_kernel(  # type: ignore[no-untyped-def]
    out, codes, shared, owner, divisor, n, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    top = tl.load(shared + tl.load(owner + at // WIDTH, at < n, 0))
    value = tl.load(codes + at, at < n, 0).to(tl.float32) * top
    tl.store(out + at, tl.div_rn(value, tl.zeros_like(value) + tl.load(divisor)), at < n)


@fused(_ternary)
def ternary(a: Tensor, own: Tensor, shared: Tensor, owner: Tensor, noise: Tensor) -> Tensor:
    codes, n = torch.empty(a.numel(), dtype=torch.int8, device=a.device), a.numel()
    programs = -(-n // LAUNCH["TILE"])
    ternary_kernel(programs, a, own, shared, owner, noise, codes, n, WIDTH=n // len(owner), **LAUNCH)
    return codes


@fused(_ternary_values)
def ternary_values(out: Tensor, codes: Tensor, shared: Tensor, owner: Tensor, divisor: Tensor) -> Tensor:
    n = out.numel()
    programs = -(-n // LAUNCH["TILE"])
    ternary_values_kernel(programs, out, codes, shared, owner, divisor, n, WIDTH=n // len(owner), **LAUNCH)
    return out
