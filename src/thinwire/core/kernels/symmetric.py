"""Symmetric matrices: packed as one row of their upper triangle, and inverted under damping.

Packed, they are half the bytes in a message or a checkpoint.

If a factorisation fails, it is tried again at the next *level*, on which ranks can agree: 0, the plain factorisation; 1
to 3, ten, a hundred and a thousand times the damping; 4, fp64 on the CPU with the original damping; ``FAILED``, nothing
helped and the caller keeps what it had. Level 4 exists because CUDA's factorisations have failed, or returned wrong
results, on ill-conditioned input (pytorch issues 94772, 105359). Factors are not overwritten.

``first_inverse`` and ``first_eigen`` take a batch of one shape, and report whether level 0 succeeded as a tensor on the
device, so one host read covers many factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from thinwire.core.kernels.finite import finite_rows
from thinwire.core.kernels.fused import Kernel, fused

if TYPE_CHECKING:
    import triton.language as tl


def packed_size(d: int) -> int:
    return d * (d + 1) // 2


def side_of(size: int) -> int:
    d = (math.isqrt(8 * size + 1) - 1) // 2
    if packed_size(d) != size:
        raise ValueError(f"{size} elements are not the upper triangle of a square matrix")
    return d


def pack_upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix row by row: ``[d, d]`` -> ``[d(d+1)/2]``, a new tensor.

    The lower triangle is not read.
    """
    d = matrix.shape[0]
    if matrix.shape != (d, d):
        raise ValueError(f"only square matrices can be packed, not {list(matrix.shape)}")
    return packed_times(matrix, 1.0)


def _packed_times(matrix: Tensor, factor: float, end: float | None = None) -> Tensor:
    """Return the upper triangle times a factor, and if there is an ``end``, that after it; also of a batch."""
    packed = torch.cat([matrix[..., i, i:] for i in range(matrix.shape[-1])], -1)
    if factor != 1:
        packed.mul_(factor)
    return packed if end is None else torch.cat([packed, packed.new_full((*packed.shape[:-1], 1), end)], -1)


@Kernel
def pack_kernel(  # type: ignore[no-untyped-def]
    matrix, packed, factor, end, side, down, across, apart: int, room: int, END: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64) // side
    row = tl.program_id(0).to(tl.int64) % side
    matrix += number * apart
    packed += number * room
    start = row * side - row * (row - 1) // 2 - row  # where its first column would be
    for begin in range(row, side, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        found = tl.load(matrix + row * down + column * across, column < side)
        tl.store(packed + start + column, found * factor, column < side)
    if END and row == side - 1:
        tl.store(packed + start + side, end)


@fused(_packed_times)
def packed_times(matrix: Tensor, factor: float, end: float | None = None) -> Tensor:
    d, ends = matrix.shape[-1], end is not None
    packed = matrix.new_empty(*matrix.shape[:-2], packed_size(d) + ends)
    apart, down, across = (0, *matrix.stride())[-3:]
    if d:
        pack_kernel(
            matrix.numel() // d, matrix, packed, factor, end or 0.0, d, down, across, apart, packed.shape[-1],
            END=ends, BLOCK=512,
        )  # fmt: skip
    return packed


def unpack_upper(packed: Tensor, d: int | None = None) -> Tensor:
    """Return the symmetric matrix of a packed triangle, or of each of a batch, bit for bit what was packed.

    ``[..., d(d+1)/2]`` -> ``[..., d, d]``.
    """
    side = side_of(packed.shape[-1])
    if d is not None and d != side:
        raise ValueError(f"{packed.shape[-1]} elements are the triangle of {side} x {side}, not of {d} x {d}")
    return unpacked(packed, side)


def _unpacked(packed: Tensor, side: int) -> Tensor:
    matrix = packed.new_zeros(*packed.shape[:-1], side, side)
    if side:
        rows = [matrix[..., i, i:] for i in range(side)]
        torch._foreach_copy_(rows, list(packed.split(list(range(side, 0, -1)), -1)))
    return matrix + matrix.triu(1).mT


@Kernel
def unpack_kernel(packed, matrix, side, room: int, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) % side
    packed += tl.program_id(0).to(tl.int64) // side * room
    matrix += (tl.program_id(0).to(tl.int64) - row) * side
    for begin in range(0, side, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        low, high = tl.minimum(column, row), tl.maximum(column, row)
        found = tl.load(packed + low * side - low * (low - 1) // 2 + high - low, column < side)
        tl.store(matrix + row * side + column, found, column < side)


@fused(_unpacked)
def unpacked(packed: Tensor, side: int) -> Tensor:
    matrix = packed.new_empty(*packed.shape[:-1], side, side)
    if side:
        unpack_kernel(matrix.numel() // side, packed, matrix, side, packed.stride(0), BLOCK=512)
    return matrix


_Found = TypeVar("_Found")

ON_CPU, FAILED = 4, 5
"""The level of fp64 on the CPU, and the level that means giving up."""


def first_inverse(factors: Tensor, damping: float | Tensor, *, own: bool = False) -> tuple[Tensor, Tensor]:
    """Do level 0 of ``damped_inverse`` for ``[n, d, d]``; return inverses, and success, ``[n]``.

    ``damping``: may be one for each, ``[n, 1]``. ``own``: the factors' memory may be used.
    """
    damped = factors if own else factors.clone()
    damped.diagonal(dim1=1, dim2=2).add_(damping)
    lower, info = torch.linalg.cholesky_ex(damped)
    inverses = torch.cholesky_inverse(lower)
    return inverses, (info == 0) & finite_rows(inverses)


def first_eigen(factors: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Do level 0 of ``damped_eigen`` for ``[n, d, d]``, with success, ``[n]``. Some back ends raise ``LinAlgError``."""
    finite = finite_rows(factors)
    known = torch.where(finite[:, None, None], factors, 0.0)  # on NaN, LAPACK may raise or never return
    values, vectors = torch.linalg.eigh(known)
    return (vectors, values.clamp(min=0)), finite & finite_rows(values) & finite_rows(vectors)


def damped_inverse(factor: Tensor, damping: float, least: int = 0) -> tuple[Tensor, int]:
    """Return ``(factor + damping I)^-1`` by Cholesky, zeros if all levels failed, and the level that succeeded."""

    def attempt(level: int) -> Tensor | None:
        if level == ON_CPU:
            found = _cholesky(factor.detach().to("cpu", torch.float64), damping)
            return None if found is None else found.to(factor.device, factor.dtype)
        return _cholesky(factor, damping * 10.0**level)

    found, level = _climb(attempt, range(least, FAILED))
    return torch.zeros_like(factor) if found is None else found, level


def damped_eigen(factor: Tensor, least: int = 0) -> tuple[Tensor, Tensor, int]:
    """Return eigenvectors (columns), eigenvalues, negative ones as 0, and the level that succeeded; zeros if none.

    Damping is added when they are used.
    """

    def attempt(level: int) -> tuple[Tensor, Tensor] | None:
        if level == ON_CPU:
            found = _eigh(factor.detach().to("cpu", torch.float64))
            return None if found is None else tuple(x.to(factor.device, factor.dtype) for x in found)  # type: ignore[return-value]
        return _eigh(factor)

    found, level = _climb(attempt, [n for n in (0, ON_CPU) if n >= least])
    if found is None:
        return torch.zeros_like(factor), torch.zeros_like(factor[0]), level
    return *found, level


def mean_diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def pi_ratio(a: Tensor, g: Tensor) -> Tensor:
    """Return ``sqrt((tr A / d_A) / (tr G / d_G))``, or 1: how Martens and Grosse (2015, 6.3) split damping.

    ``a``, ``g``: these means of the diagonals.
    """
    ratio = (a / g).sqrt()
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))


def precondition(gradient: Tensor, a_inverse: Tensor, g_inverse: Tensor) -> Tensor:
    """Return ``G^-1 gradient A^-1``: ``[d_G, d_A]`` -> the same."""
    return g_inverse @ gradient @ a_inverse


def precondition_eigen(gradient: Tensor, a: tuple[Tensor, Tensor], g: tuple[Tensor, Tensor], damping: float) -> Tensor:
    """Return ``(A kron G + damping I)^-1 vec(gradient)``, ``[d_G, d_A]``, from both factors' vectors and values."""
    (a_vectors, a_values), (g_vectors, g_values) = a, g
    rotated = (g_vectors.mT @ gradient @ a_vectors) / (torch.outer(g_values, a_values) + damping)
    return g_vectors @ rotated @ a_vectors.mT


def _climb(attempt: Callable[[int], _Found | None], levels: Iterable[int]) -> tuple[_Found | None, int]:
    for level in levels:
        try:
            found = attempt(level)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # some back ends raise where others say so
            continue
        if found is not None:
            return found, level
    return None, FAILED


def _cholesky(factor: Tensor, damping: float) -> Tensor | None:
    (inverse,), good = first_inverse(factor[None], damping)
    return inverse if bool(good) else None


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    ((vectors,), (values,)), good = first_eigen(factor[None])
    return (vectors, values) if bool(good) else None
