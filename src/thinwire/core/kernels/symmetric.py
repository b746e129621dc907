"""Symmetric matrices as one row of their upper triangle: half the bytes in a message or a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_size(d: int) -> int:
    """Return the number of elements in the upper triangle of a ``d x d`` matrix, including the diagonal."""
    return d * (d + 1) // 2


def side_of(size: int) -> int:
    """Return the ``d`` whose ``packed_size`` is ``size``.

    Raises:
        ValueError: no triangle has that many elements.
    """
    d = (math.isqrt(8 * size + 1) - 1) // 2
    if packed_size(d) != size:
        raise ValueError(f"{size} elements are not the upper triangle of a square matrix")
    return d


def pack_upper(matrix: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Return the upper triangle row by row: ``[d, d]`` -> ``[d(d+1)/2]``, a new tensor.

    Args:
        matrix: symmetric; the lower triangle is not read unless a tolerance is given.
        tolerance: the largest allowed difference from the transpose, relative to the largest element.

    Raises:
        ValueError: the matrix is not square, or not symmetric.
    """
    d = matrix.shape[0]
    if matrix.shape != (d, d):
        raise ValueError(f"only square matrices can be packed, not {list(matrix.shape)}")
    if tolerance is not None:
        off = float((matrix - matrix.mT).abs().max())
        if not off <= tolerance * float(matrix.abs().max()):
            raise ValueError(f"the matrix differs from its transpose by {off:.3g}: only symmetric ones can be packed")
    return torch.cat([matrix[i, i:] for i in range(d)])


def unpack_upper(packed: Tensor, d: int | None = None) -> Tensor:
    """Return the symmetric matrix of a packed triangle: ``[d(d+1)/2]`` -> ``[d, d]``, bit for bit what was packed.

    Raises:
        ValueError: that many elements are no triangle, or not that of ``d``.
    """
    side = side_of(packed.numel())
    if d is not None and d != side:
        raise ValueError(f"{packed.numel()} elements are the triangle of {side} x {side}, not of {d} x {d}")
    matrix = packed.new_zeros(side, side)
    if side:
        rows = [matrix[i, i:] for i in range(side)]
        torch._foreach_copy_(rows, list(packed.split(list(range(side, 0, -1)))))
    return matrix + matrix.triu(1).mT
