"""Sums in rank order: the same bits on all ranks, and for any buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.program.bucket import working_dtype


def ordered_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum W tensors ``[k]`` in rank order, 16-bit floats in fp32.

    Returns:
        A new tensor of their dtype; or ``out``, which may be one of them.
    """
    dtype = parts[0].dtype
    wide = working_dtype(dtype) if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    if len(parts) == 1:
        return total.to(dtype, copy=True) if out is None else out.copy_(total)
    for place, part in enumerate(parts[1:], 1):
        if out is not None and wide == dtype and place == len(parts) - 1:  # nothing is read after it
            return torch.add(total, part, out=out)
        total = total + part if total is parts[0] else total.add_(part)
    return total.to(dtype) if out is None else out.copy_(total)
