"""Pack one bit per element: bit j of byte i belongs to element 8i + j; the last byte is padded with 0."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight bools read as one int64 have element j in bit 8j; the product moves it to bit 56 + j, without carries.
_GATHER = sum(1 << (56 - 7 * j) for j in range(8))
_WIDE = {8: torch.float64, 16: torch.complex128}  # by number of bytes
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


def add_values(out: Tensor, bits: Tensor, high: Tensor, low: Tensor, owner: Tensor | None = None) -> None:
    """Add to ``out`` [n], for each row of ``bits`` [P, ceil(n / 8)], ``high[row]`` where set, else ``low[row]``.

    One pass over ``out``; rows are added in order, so the result does not depend on the device.

    Args:
        owner: int32 [ceil(n / 8)]: each byte's column of ``high`` and ``low``, which then are [P, T].
    """
    if out.device.type == "meta":
        return
    # For every possible byte, the 8 values that it stands for.
    tables = torch.where(codes_of_bytes(1, out.device).bool(), high[..., None, None], low[..., None, None])
    tables, size = tables.view(len(bits), -1, 8), _piece(bits.device)
    for start in range(0, bits.shape[1], size):
        piece = out[8 * start : 8 * (start + size)]
        first = None if owner is None else owner[start : start + size] * 256
        for table, row in zip(tables.unbind(), bits[:, start : start + size].unbind()):
            index = row.int() if first is None else first + row
            piece += look_up(table, index)[: piece.numel()]


def codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Return the codes, of that many bits each, low bits first, that every byte holds: [256, 8 / bits]."""
    every, shifts = torch.arange(256, device=device), torch.arange(0, 8, bits, device=device)
    codes: Tensor = (every[:, None] >> shifts) & (2**bits - 1)
    return codes


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of a table, one after another. Short rows are gathered as one wide number, which is faster."""
    wide = _WIDE.get(table.shape[1] * table.element_size())
    if wide is not None:
        table, narrow = table.view(wide).view(-1), table.dtype
        return table.index_select(0, index).view(narrow)
    return table.index_select(0, index).view(-1)


def _piece(device: torch.device) -> int:
    return _PIECE_BYTES if device.type == "cpu" else 1 << 40
