"""A tensor's bytes, for sockets."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8})  # numpy's too


def memory_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which they keep alive.

    Slicing them costs less than slicing a tensor.
    """
    if x.dtype in _PLAIN and x.numel():
        return memoryview(x.detach().numpy()).cast("B")  # type: ignore[arg-type]  # an array is a buffer
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def shares_memory(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, by ``expand``: it cannot be written to in place."""
    return any(size > 1 and not stride for size, stride in zip(x.shape, x.stride()))
