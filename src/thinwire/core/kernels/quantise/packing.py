"""Codes of 1, 2, 4 or 8 bits packed into bytes, low bits first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel

if TYPE_CHECKING:
    import triton.language as tl

# Eight bools read as one int64 have element j in bit 8j; the product moves it to bit 56 + j, without carries.
_GATHER = sum(1 << (56 - 7 * j) for j in range(8))
_ROWS_AS = {8: torch.float64, 16: torch.complex128}  # by number of bytes
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # to read that many codes, of one byte each, as one integer


def packed_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def pack_bits(mask: Tensor) -> Tensor:
    mask = mask.reshape(-1)
    n = mask.numel()
    if n % 8 or not mask.is_contiguous() or mask.storage_offset() % 8:
        padded = torch.zeros(n + -n % 8, dtype=torch.bool, device=mask.device)
        padded[:n] = mask
        mask = padded
    return ((mask.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[n]`` below 2^bits into uint8 ``[ceil(n bits / 8)]``: low bits first, padded with 0."""
    per = 8 // bits
    if per == 1:
        return codes
    n = codes.numel()
    if n % per or codes.storage_offset() % per or not codes.is_contiguous():
        padded = codes.new_zeros(n + -n % per)
        padded[:n] = codes
        codes = padded
    wide = codes.view(_WIDE[per])
    packed = wide
    for j in range(1, per):
        packed = packed | (wide >> ((8 - bits) * j))
    return packed.to(torch.uint8)


def unpack_codes(packed: Tensor, n: int, bits: int) -> Tensor:
    if bits == 8:
        return packed[..., :n]
    wide = packed.to(_WIDE[8 // bits])
    if bits == 2:  # to the two halves of an integer, then to its four bytes
        wide = (wide | (wide << 12)) & 0x000F000F
        wide = (wide | (wide << 6)) & 0x03030303
    else:
        wide = (wide | (wide << 4)) & 0x0F0F
    return wide.view(torch.uint8)[..., :n]


def codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Return the codes, of that many bits each, low bits first, that every byte holds: [256, 8 / bits]."""
    every, shifts = torch.arange(256, device=device), torch.arange(0, 8, bits, device=device)
    codes: Tensor = (every[:, None] >> shifts) & (2**bits - 1)
    return codes


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table, one after another. Short rows are gathered as one wide number, which is faster."""
    wide = _ROWS_AS.get(table.shape[1] * table.element_size())
    if wide is not None:
        table, narrow = table.view(wide).view(-1), table.dtype
        return table.index_select(0, index).view(narrow)
    return table.index_select(0, index).view(-1)


@Kernel
def packed(codes, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack the columns of a tile of int32 codes: ``[rows, columns]`` to ``[rows, columns BITS / 8]``."""
    HALVINGS: tl.constexpr = 3 if BITS == 1 else (2 if BITS == 2 else 8 // BITS - 1)
    for i in tl.static_range(HALVINGS):
        even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        codes = even | (odd << (BITS << i))
    return codes


@Kernel
def unpacked(codes, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Undo ``packed``."""
    HALVINGS: tl.constexpr = 3 if BITS == 1 else (2 if BITS == 2 else 8 // BITS - 1)
    for i in tl.static_range(HALVINGS):
        codes = tl.interleave(codes & ((1 << (4 >> i)) - 1), codes >> (4 >> i))
    return codes
