"""The thin factors of a cut dense layer: truncated SVD of the weight, or of its output on sample activations.

Singular vectors are unique only up to sign, and up to rotation if values are equal. So the factorisation is done once,
in one place, and its parts are given to the two machines. With random weights the spectrum is flat: the truncation
error of an untrained model says nothing about that of a trained one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_DAMPING = 1e-6


@dataclass(frozen=True)
class Factors:
    """``W ~ u @ s @ v`` of one dense layer, and the residual's directions that are kept.

    Attributes:
        u: ``[f, r]``, for the cloud.
        s: ``[r, r]``, for the edge; diagonal at first, a full matrix in training.
        v: ``[r, h]``, for the edge.
        directions: ``[q, h]``, orthonormal rows; q is 0 unless the residual is "lowrank:q".
    """

    u: Tensor
    s: Tensor
    v: Tensor
    directions: Tensor

    @classmethod
    def empty(cls, f: int, h: int, r: int, q: int) -> Factors:
        """Return factors without values (meta tensors), to be filled from a file."""
        shapes = ((f, r), (r, r), (r, h), (q, h))
        return cls(*(torch.empty(shape, device="meta") for shape in shapes))


def factorise(weight: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best factors of a given rank.

    Args:
        weight: ``[f, h]``, as ``Linear.weight``.
        rank: r, 1 to ``min(f, h)``.
        moment: ``[h, h]``, the mean of x^T x over input rows x: the factors then minimise the mean squared error of the
            output instead of the weight. With C = G G^T (Cholesky), that is the SVD of ``weight @ G``.

    Returns:
        ``u [f, r], s [r, r], v [r, h]`` in the dtype of the weight; computed in fp64.
    """
    w = weight.detach().double()
    if moment is None:
        u, values, v = _svd(w, rank)
    else:
        c = moment.double()
        c = c + torch.eye(len(c), dtype=c.dtype, device=c.device) * (_DAMPING * c.diagonal().mean())
        g = torch.linalg.cholesky(c)
        u, values, v = _svd(w @ g, rank)
        v = torch.linalg.solve_triangular(g, v, upper=False, left=False)
    return u.to(weight.dtype), torch.diag(values).to(weight.dtype), v.to(weight.dtype)


def principal_directions(moment: Tensor, count: int) -> Tensor:
    """Return the ``count`` leading eigenvectors ``[count, h]`` of a second moment ``[h, h]``, largest value first."""
    vectors = torch.linalg.eigh(moment.double()).eigenvectors.T.flip(0)[:count]
    return _signed(vectors)[0]


def _svd(w: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, values, v = torch.linalg.svd(w, full_matrices=False)
    v, signs = _signed(v)
    return u[:, :rank] * signs[:rank], values[:rank], v[:rank]


def _signed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with their largest entry positive, and the signs: LAPACK leaves the sign open, this fixes it."""
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(rows.dtype)
    return rows * signs, signs.squeeze(1)
