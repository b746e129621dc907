"""Pack a sparse vector into one message: k values, padded to 4 bytes, then k int32 indices, in one uint8 tensor."""

from __future__ import annotations

import torch
from torch import Tensor

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP16_MAX = 65504.0


def wire_dtype(wire: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values in a message: "fp32" keeps fp64 for fp64 gradients."""
    return dtype if wire == "fp32" and dtype == torch.float64 else WIRES[wire]


def message_bytes(k: int, dtype: torch.dtype) -> int:
    return _value_bytes(k, dtype) + 4 * k


def to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values to the message's dtype; finite values beyond fp16's range become its largest."""
    if dtype == torch.float16:
        values = torch.where(values.isfinite(), values.clamp(-_FP16_MAX, _FP16_MAX), values)
    return values.to(dtype)


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Pack values (already rounded) and int64 indices below 2^31, ``[..., k]`` -> uint8 ``[..., message_bytes]``."""
    body = values.contiguous().view(torch.uint8)
    gap = _value_bytes(values.shape[-1], values.dtype) - body.shape[-1]
    parts = [body, body.new_zeros(*body.shape[:-1], gap)] if gap else [body]
    return torch.cat([*parts, indices.to(torch.int32).view(torch.uint8)], -1)


def unpack(message: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unpack messages ``[..., bytes]`` -> (values ``[..., k]`` in ``dtype``, indices ``[..., k]`` int64)."""
    cut = _value_bytes(k, dtype)
    lead = message.shape[:-1]
    values = message[..., : k * dtype.itemsize].reshape(-1).view(dtype)
    indices = message[..., cut : cut + 4 * k].reshape(-1).view(torch.int32)
    return values.view(*lead, k), indices.long().view(*lead, k)


def add_pairs(out: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Add ``[P, k]`` pairs to ``out`` ``[d]``, rank by rank, so that bits do not depend on the device's order."""
    for v, i in zip(values.unbind(), indices.unbind()):
        out.index_add_(0, i, v.to(out.dtype))
    return out


def by_index(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    if indices.device.type == "meta":
        return values, indices
    indices, order = torch.sort(indices)
    return values[order], indices


def merge_pairs(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest entries of the sum of two sparse vectors of k pairs each: gTop-k's operator.

    Both are (values, indices) in ascending order of distinct indices; swapping them gives the same sums, bit for bit.
    Returns values and indices, chosen by :func:`largest`, in that order, and each one's place in ``mine``, else -1.
    """
    k = mine[1].numel()
    if mine[1].device.type == "meta":
        return mine[0].new_empty(k), mine[1].new_empty(k), mine[1].new_empty(k)
    indices, order = torch.sort(torch.cat([mine[1], other[1]]), stable=True)
    values = torch.cat([mine[0], other[0]])[order]
    twin = torch.zeros_like(indices, dtype=torch.bool)  # the second of two equal indices, from ``other``
    torch.eq(indices[1:], indices[:-1], out=twin[1:])
    values[:-1] += torch.where(twin[1:], values[1:], 0)
    kept = largest(values, torch.where(twin, -1, indices), k)
    return take(values, kept, k), take(indices, kept, k), take(torch.where(order < k, order, -1), kept, k)


def largest(values: Tensor, indices: Tensor, k: int) -> Tensor:
    """Return where each pair goes if the k largest by (magnitude, place) stay in their order: 0 to k - 1, else k.

    NaN is the largest, index -1 the smallest. Fixed shapes and no sort: equal input gives equal output everywhere.
    """
    size = torch.where(indices < 0, -1.0, torch.where(values.isnan(), torch.inf, values.abs()))
    limit = torch.topk(size, k, sorted=False).values.amin()
    above, equal = size > limit, size == limit
    keep = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.where(keep, keep.cumsum(0) - 1, k)


def take(x: Tensor, places: Tensor, k: int) -> Tensor:
    return x.new_empty(k + 1).scatter_(0, places, x)[:k]


def contains(indices: Tensor, wanted: Tensor) -> Tensor:
    """Return whether each of ``wanted`` is among ``indices``, which are in ascending order."""
    if indices.device.type == "meta":
        return torch.empty(wanted.shape, dtype=torch.bool, device="meta")
    return indices[torch.searchsorted(indices, wanted).clamp_(max=indices.numel() - 1)] == wanted


def _value_bytes(k: int, dtype: torch.dtype) -> int:
    return -(-k * dtype.itemsize // 4) * 4
