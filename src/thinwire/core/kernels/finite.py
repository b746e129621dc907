"""Whether all is finite, without a host read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Return whether every element is finite, as a 0-dim bool tensor; one pass, no temporary, no host read."""
    if x.numel() == 0 or x.device.type == "meta":
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.device.type == "cuda":  # a launch; on a CPU twenty times as slow
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf)
        return largest < torch.inf
    low, high = torch.aminmax(x)  # both are NaN if any element is
    return torch.maximum(-low, high) < torch.inf


def each_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``all_finite`` of each, ``[len(tensors)]``."""
    if tensors[0].device.type == "cuda" and all(x.numel() for x in tensors):
        return torch.stack(torch._foreach_norm(list(tensors), torch.inf)) < torch.inf
    return torch.stack([all_finite(x) for x in tensors])


def finite_rows(x: Tensor) -> Tensor:
    """Return ``all_finite`` of each row of a tensor, ``[len(x)]``."""
    if x.device.type == "cuda" and x.numel():
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=tuple(range(1, x.dim())))
        return largest < torch.inf
    return each_finite(x.unbind())


def every_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether every element of all tensors is finite, as a 0-dim bool tensor."""
    some = [x for x in tensors if x.numel()]
    if some and some[0].device.type == "cuda" and len({x.dtype for x in some}) == 1:
        return all_finite(torch.stack(torch._foreach_norm(some, torch.inf)))
    return torch.stack([all_finite(x) for x in tensors]).all()
