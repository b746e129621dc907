"""Undo a step that was not accepted, which only the device knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 1 << 11


def _restore(x: Tensor, before: Tensor, accepted: Tensor) -> None:
    """Turn ``x`` [n] back to what it was ``before``, unless it is ``accepted``, a 0-dim bool; that costs nothing."""
    x.copy_(torch.where(accepted, x, before))


@Kernel
def restore_kernel(x, before, accepted, n, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(accepted) == 0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(x + at, tl.load(before + at, at < n, 0.0), at < n)


@fused(_restore)
def restore(x: Tensor, before: Tensor, accepted: Tensor) -> None:
    restore_kernel(-(-x.numel() // _TILE), x, before, accepted, x.numel(), TILE=_TILE)
