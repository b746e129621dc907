"""Views of memory: of what a rank holds of a tensor; of tensors that lie one after the other, each or all as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors of these shapes that lie one after the other in a 1-D tensor, from its first element on."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(torch.Size(shape)) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one 1-D view; None if they do not lie one after the other, each contiguous."""
    first, size = tensors[0], 0
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for x in tensors:
        here = x.untyped_storage().data_ptr() == memory and x.storage_offset() == start + size
        if not (here and x.is_contiguous() and x.dtype == first.dtype):
            return None
        size += x.numel()
    return first.as_strided((size,), (1,), start)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one batch: a view if they lie one after the other, else a copy."""
    found = joined(tensors)
    return torch.stack(list(tensors)) if found is None else found.view(len(tensors), *tensors[0].shape)


def here(x: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard of a DTensor, detached; else the tensor itself."""
    local: Tensor = x.detach().to_local() if hasattr(x, "to_local") else x  # type: ignore[attr-defined,unused-ignore]
    return local
