"""8 or 4 bits per number, one scale per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.quantise import levels, pack_codes, packed_bytes, unpack_codes
from thinwire.systems.split.codecs.base import Codec, check_parts


class Quantised(Codec):
    """Round each number to a level of its token: q = round(x k / s), k = 2^(bits - 1) - 1, s >= max|x| as sent.

    The error per number is at most s / (2 k): s / 254 with 8 bits, s / 14 with 4. Scales are bf16, rounded up so that
    nothing clips; fp16 would underflow on small gradients.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"  # type: ignore[misc]
        self.bits = bits

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Return codes, uint8 ``[n, ceil(w bits / 8)]``, and scales, bf16 ``[n]``."""
        return list(quantise(rows, self.bits))

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        check_parts(self.name, parts, [(torch.uint8, (packed_bytes(width, self.bits),)), (torch.bfloat16, ())])
        return dequantise(parts[0], parts[1], width, self.bits, dtype)

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """Return the bytes of the codes and one scale."""
        return packed_bytes(width, self.bits) + 2


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 ``[n, ceil(w bits / 8)]``, and scales, bf16 ``[n]``, of rows ``[n, w]``.

    Raises:
        ValueError: a number is not finite, so no level represents it.
    """
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(
            "the activation or its gradient holds NaN or infinity: lower the learning rate, or leave codecs out"
        )
    n, width = rows.shape
    k = levels(bits)
    scale = _rounded_up(rows.abs().amax(1) if width else rows.new_zeros(n))
    s = scale.to(rows.dtype)[:, None]
    codes = ((rows / torch.where(s > 0, s, 1)) * k).round_().add_(k).clamp_(0, 2 * k).to(torch.uint8)
    per = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -width % per))
    return pack_codes(codes.reshape(-1), bits).view(n, packed_bytes(width, bits)), scale


def dequantise(codes: Tensor, scales: Tensor, width: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return rows ``[n, width]`` of ``dtype`` from codes and scales."""
    n, k, stored = len(codes), levels(bits), codes.shape[1] * (8 // bits)
    rows = unpack_codes(codes.reshape(-1), n * stored, bits).view(n, stored)[:, :width].to(dtype)
    return (rows - k) * (scales.to(dtype) / k)[:, None]


def _rounded_up(top: Tensor) -> Tensor:
    """Return the smallest bf16 number that is not below ``top``."""
    near = top.to(torch.bfloat16)
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.to(top.dtype) < top, above, near)
