"""A sparse vector as one message: k values, padded to 4 bytes, then k int32 indices, all in one uint8 tensor."""

from __future__ import annotations

import torch
from torch import Tensor

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP16_MAX = 65504.0


def wire_dtype(wire: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values on the wire: "fp32" keeps fp64 for fp64 gradients."""
    return dtype if wire == "fp32" and dtype == torch.float64 else WIRES[wire]


def message_bytes(k: int, dtype: torch.dtype) -> int:
    """Length of a message of k pairs."""
    return _value_bytes(k, dtype) + 4 * k


def to_wire(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values to the wire's dtype; finite values beyond fp16's range become its largest."""
    if dtype == torch.float16:
        values = torch.where(values.isfinite(), values.clamp(-_FP16_MAX, _FP16_MAX), values)
    return values.to(dtype)


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Values (in their wire dtype) and int64 indices below 2^31, both ``[k]`` -> uint8 ``[message_bytes]``."""
    k = values.numel()
    body = values.contiguous().view(torch.uint8)
    gap = _value_bytes(k, values.dtype) - body.numel()
    parts = [body, body.new_zeros(gap)] if gap else [body]
    return torch.cat([*parts, indices.to(torch.int32).view(torch.uint8)])


def unpack(message: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Messages ``[..., bytes]`` -> (values ``[..., k]`` in ``dtype``, indices ``[..., k]`` int64)."""
    cut = _value_bytes(k, dtype)
    lead = message.shape[:-1]
    values = message[..., : k * dtype.itemsize].reshape(-1).view(dtype)
    indices = message[..., cut : cut + 4 * k].reshape(-1).view(torch.int32)
    return values.view(*lead, k), indices.long().view(*lead, k)


def add_pairs(out: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Add ``[P, k]`` pairs into ``out`` ``[d]``, rank by rank, so that the bits do not depend on the device's order."""
    for v, i in zip(values.unbind(), indices.unbind()):
        out.index_add_(0, i, v.to(out.dtype))
    return out


def _value_bytes(k: int, dtype: torch.dtype) -> int:
    return -(-k * dtype.itemsize // 4) * 4
