"""How DDP lays gradients out in a bucket's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.program import Slot


def gradient_views(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients as DDP lays them out, in the parameters' strides. ``GradBucket.gradients`` ignores these."""
    if any(p.is_complex() for p in parameters):
        raise TypeError("the DDP model has a complex parameter; thinwire exchanges real floating-point gradients only")
    if sum(p.numel() for p in parameters) != buffer.numel():
        raise RuntimeError(
            "DDP's bucket holds more than its parameters' gradients; this version of torch is not supported"
        )
    views, start = [], buffer.storage_offset()
    for p in parameters:
        strides = p.stride() if _fills_its_memory(p) else torch.empty(p.shape, device="meta").stride()
        views.append(buffer.as_strided(p.shape, strides, start))
        start += p.numel()
    return views


def _fills_its_memory(x: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in some order of its axes."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def into_values(slots: Sequence[Slot]) -> None:
    """Write the averages to where the gradients were."""
    for slot in slots:
        result, target = slot.result, slot.value
        assert target is not None
        if result is not None and not (result.data_ptr() == target.data_ptr() and result.stride() == target.stride()):
            target.copy_(result)


def joined(slots: Sequence[Slot]) -> Tensor | None:
    """Return the gradients as one 1-D tensor if they are consecutive and contiguous; else None."""
    first = slots[0].value
    assert first is not None
    start = first.storage_offset()
    for slot in slots:
        value = slot.value
        assert value is not None
        if not value.is_contiguous() or value.storage_offset() != start:
            return None
        start += slot.numel
    return first.as_strided((start - first.storage_offset(),), (1,), first.storage_offset())
