"""Orthonormal bases of tall, thin matrices: on CPUs by QR, on GPUs by two rounds of Cholesky-QR in three launches.

A round makes the Gram matrix ``xT x = L LT`` and ``x L^-T``. It squares the condition number, so Gram matrix and factor
are fp64; the second round repairs what the first one lost. A column that is closer than 3e-7 of its length to the span
of those before it, which fp32 cannot tell from a multiple of them, becomes noise in the first round; so each matrix has
a basis, and no round can fail. Without such columns the bases are those of QR, but for the signs of columns.

Loss of orthogonality max|QtQ - 1|, 1024 x 8, rounded to fp32: 5e-7 by QR and 1e-8 in rounds, up to condition 1e9.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core.kernels.fused import Kernel, fused
from thinwire.core.kernels.seeding import upload

if TYPE_CHECKING:
    import triton.language as tl

Shape = Sequence[int]


def views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors of these shapes that lie one after the other in a 1-D tensor, from its first element on."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(torch.Size(shape)) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


def orthogonalise(x: Tensor) -> Tensor:
    """Return orthonormal columns that span those of ``x`` ``[..., n, r]``, fp32 or fp64, r <= n.

    Non-finite elements count as 0 (such a step is rejected anyway); zero columns become some orthonormal column.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"orthogonalise needs fp32 or fp64, not {x.dtype}: convert first")
    n, r = x.shape[-2:]
    if n < r:
        raise ValueError(f"{r} columns of {n} rows cannot be orthonormal")
    if x.numel() == 0 or x.device.type == "meta":
        return x.new_empty(x.shape)
    q: Tensor = torch.linalg.qr(x.nan_to_num(0.0, 0.0, 0.0)).Q
    return q


def _by_qr(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Do as ``orthogonalise`` for matrices, or batches ``[b, n, r]``, that lie one after the other in a 1-D tensor.

    Those of one shape go in one batch, all row-major: else bits depend on what else is there.
    """
    matrices = views(flat, shapes)
    groups: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(matrices):
        groups.setdefault(x.shape, []).append(i)
    for indices in groups.values():
        batch = [orthogonalise(matrices[indices[0]])]
        if len(indices) > 1:
            batch = list(orthogonalise(torch.stack([matrices[i] for i in indices])).unbind())
        for i, q in zip(indices, batch):
            matrices[i] = q.contiguous()
    return matrices


TILE_PRODUCTS = 2048
MOST_COLUMNS = 32


@Kernel
def round_kernel(  # type: ignore[no-untyped-def]
    x, chunks, before, out, after, RANK: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr, APPLY: tl.constexpr,
    GRAM: tl.constexpr,
):  # fmt: skip
    here = chunks + tl.program_id(0) * 5
    start, rows, each, first, count = (
        tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3), tl.load(here + 4)
    )  # fmt: skip
    c = tl.arange(0, SIDE)
    down, across, diagonal = c[:, None], c[None, :], c[:, None] == c[None, :]
    place = down * SIDE + across
    lost = tl.zeros((SIDE,), tl.int32)
    inverse = diagonal.to(tl.float64)  # of the Cholesky factor; begins as the identity
    if APPLY:
        left = tl.zeros((SIDE, SIDE), tl.float64)  # what is to be factored yet
        for chunk in range(count):
            left += tl.load(before + (first + chunk) * SIDE * SIDE + place)
        whole = tl.sum(tl.where(diagonal, left, 0.0), 0)
        for j in range(RANK):
            row = tl.sum(tl.where(down == j, left, 0.0), 0)
            pivot, length = tl.sum(tl.where(c == j, row, 0.0)), tl.sum(tl.where(c == j, whole, 0.0))
            good = pivot > 1e-13 * length
            scale = tl.where(good, 1.0 / tl.sqrt(tl.where(good, pivot, 1.0)), 0.0)
            lower = tl.where(c > j, row * scale, 0.0)
            unit = tl.sum(tl.where(down == j, inverse, 0.0), 0) * scale
            inverse = tl.where(down == j, unit[None, :], inverse - lower[:, None] * unit[None, :])
            left -= lower[:, None] * lower[None, :]
            lost = tl.where((c == j) & (good == 0), 1, lost)
    grams = tl.zeros((TILE, SIDE, SIDE), tl.float64)  # one for each row of a tile
    begin = (tl.program_id(0) - first) * each
    end = tl.minimum(begin + each, rows)
    for top in range(begin, end, TILE):
        row = top + tl.arange(0, TILE)
        inside = (row < end)[:, None] & (across < RANK)
        at = row[:, None] * RANK + across
        given = tl.load(x + start + at, inside, 0.0)
        tile = tl.where(tl.abs(given) < float("inf"), given, 0.0).to(tl.float64)
        if APPLY:
            basis = tl.sum(tile[:, None, :] * inverse[None, :, :], 2).to(tl.float32)
            if tl.max(lost) > 0:
                basis = tl.where(lost[None, :] > 0, tl.rand(0, at.to(tl.int32)) - 0.5, basis)
            tl.store(out + start + at, basis, inside)
            tile = tl.where(inside, basis, 0.0).to(tl.float64)
        if GRAM:
            grams += tile[:, :, None] * tile[:, None, :]
    if GRAM:
        tl.store(after + tl.program_id(0) * SIDE * SIDE + place, tl.sum(grams, 0))


@fused(_by_qr, lambda flat, shapes: all(shape[-1] <= MOST_COLUMNS for shape in shapes))
def orthogonalise_all(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    spans, spanning = flat.new_empty(2, sum(torch.Size(shape).numel() for shape in shapes)).unbind()
    for rank in sorted({shape[-1] for shape in shapes}):
        side = 1 << max(2, (rank - 1).bit_length())
        tile = TILE_PRODUCTS // side**2
        host = _chunks(tuple(map(tuple, shapes)), rank, tile)
        chunks, programs = upload(host, flat.device), len(host)
        first, second = flat.new_empty(2, programs * side * side, dtype=torch.float64).unbind()
        sizes = {"RANK": rank, "SIDE": side, "TILE": tile}
        round_kernel(programs, flat, chunks, first, spanning, first, **sizes, APPLY=False, GRAM=True)
        round_kernel(programs, flat, chunks, first, spanning, second, **sizes, APPLY=True, GRAM=True)
        round_kernel(programs, spanning, chunks, second, spans, second, **sizes, APPLY=True, GRAM=False)
    return views(spans, shapes)


@lru_cache(maxsize=64)
def _chunks(shapes: tuple[tuple[int, ...], ...], rank: int, tile: int) -> Tensor:
    """Return a row for each chunk of a matrix of this rank, which is one program's.

    Where the matrix begins, its rows; rows of a chunk; the first chunk of the matrix, and how many it has.
    """
    found: list[tuple[int, int, int, int, int]] = []
    start = 0
    for shape in shapes:
        rows = shape[-2]
        for _ in range(torch.Size(shape[:-2]).numel()):
            if shape[-1] == rank:
                most = max(32, 4 * rank)  # each program of a matrix adds up all its Gram matrices
                each = -(-rows // (most * tile)) * tile
                count = -(-rows // each)
                found += [(start, rows, each, len(found), count)] * count
            start += rows * shape[-1]
    return torch.tensor(found)
