"""16 bits per number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.systems.split.codecs.base import Codec, check_parts

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class CastCodec(Codec):
    """Round each number to fp16 (relative error 2^-11 in its normal range) or bf16 (2^-8, and fp32's range).

    Numbers beyond 65504 become the largest fp16 number.
    """

    def __init__(self, word: str) -> None:
        self.name = word  # type: ignore[misc]
        self.dtype = DTYPES[word]

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Return the rows in 16 bits."""
        top = torch.finfo(self.dtype).max
        return [rows.clamp(-top, top).to(self.dtype).contiguous()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows in the model's dtype."""
        check_parts(self.name, parts, [(self.dtype, (width,))])
        return parts[0].to(dtype)

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """Return two bytes per number."""
        return 2 * width
