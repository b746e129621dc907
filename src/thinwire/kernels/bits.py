"""One bit per element: bit j of byte i belongs to element 8i + j, the last byte is padded with 0."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight bools read as one int64 have element j in bit 8j; the product moves it to bit 56 + j, without carries.
_GATHER = sum(1 << (56 - 7 * j) for j in range(8))
_PIECE_BYTES = 1 << 13  # of packed bits: 64 Ki elements, which stay in a CPU's cache


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a bool tensor ``[n]`` into uint8 ``[ceil(n / 8)]``."""
    mask = mask.reshape(-1)
    n = mask.numel()
    if n % 8 or not mask.is_contiguous() or mask.storage_offset() % 8:
        padded = torch.zeros(n + -n % 8, dtype=torch.bool, device=mask.device)
        padded[:n] = mask
        mask = padded
    return ((mask.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def pack_signs(x: Tensor) -> Tensor:
    """Pack ``x >= 0`` into uint8 ``[ceil(n / 8)]``.

    Example:
        >>> pack_signs(torch.tensor([1.0, -1.0, 0.0]))
        tensor([5], dtype=torch.uint8)
    """
    x = x.reshape(-1)
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.cat([pack_bits(piece >= 0) for piece in torch.split(x, 8 * _piece(x.device))])


def unpack_signs(bits: Tensor, n: int) -> Tensor:
    """The signs of ``n`` elements: int8, +1 where the bit is set, else -1."""
    out = torch.zeros(n, dtype=torch.int8, device=bits.device)
    one = torch.ones(1, dtype=torch.int8, device=bits.device)
    add_values(out, bits[None], one, -one)
    return out


def add_values(out: Tensor, bits: Tensor, high: Tensor, low: Tensor) -> None:
    """To ``out`` [n], for each row of ``bits`` [P, ceil(n / 8)], add ``high[row]`` where set, else ``low[row]``.

    One pass over ``out``; rows are added in order, so the result does not depend on the device.
    """
    codes = torch.arange(256, device=bits.device)[:, None] >> torch.arange(8, device=bits.device)
    is_set = (codes & 1).bool()
    # Of every possible byte, the 8 values that it stands for.
    tables = [torch.where(is_set, one, zero) for one, zero in zip(high.unbind(), low.unbind())]
    size = _piece(bits.device)
    for piece, rows in zip(torch.split(out, 8 * size), torch.split(bits, size, dim=1)):
        for table, row in zip(tables, rows.unbind()):
            piece += table.index_select(0, row.to(torch.int32)).reshape(-1)[: piece.numel()]


def _piece(device: torch.device) -> int:
    return _PIECE_BYTES if device.type == "cpu" else 1 << 40
