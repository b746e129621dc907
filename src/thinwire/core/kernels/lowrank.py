"""Thin factors: products of a large matrix with a thin one, and orthonormal bases of tall, thin matrices.

Products go in row blocks that stay in a CPU's cache: at 4096 x 4096 this saves a third of the time. On other devices,
and for small matrices, one block is the whole matrix.

Bases are made by QR: its loss of orthogonality max|QtQ - 1|, fp32, 1024 x 32, stays at 5e-7 up to condition 1e6;
Cholesky-QR twice does so up to 1e4, and fails at 1e6; modified Gram-Schmidt is at 1e-3 and 0.07 there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import normal

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as an int64


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


def orthogonalise_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise, those of one shape in one batch, all row-major: else bits depend on a bucket's others."""
    groups: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(matrices):
        groups.setdefault(x.shape, []).append(i)
    result = list(matrices)
    for indices in groups.values():
        if len(indices) == 1:
            result[indices[0]] = orthogonalise(matrices[indices[0]]).contiguous()
            continue
        batch = orthogonalise(torch.stack([matrices[i] for i in indices]))
        for i, q in zip(indices, batch.unbind()):
            result[i] = q.contiguous()
    return result


def basis_hash(x: Tensor) -> int:
    """Return eight bytes that change with any bit of ``x``, as a signed int64-sized integer. Copies to the host."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def fingerprint(x: Tensor) -> Tensor:
    """Return 0-dim int64 on the device that changes with any bit: bit patterns times odd numbers by place."""
    words = x.detach().contiguous().view(-1).view(torch.int32 if x.element_size() == 4 else torch.int64).to(torch.int64)
    place = torch.arange(words.numel(), device=x.device) * _GOLDEN
    return (words * ((place ^ (place >> 29)) * _GOLDEN | 1)).sum()


def arithmetic(device: torch.device) -> Tensor:
    """Return eight bytes, 0-dim int64, that differ between processors which round products or bases differently."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for n, m, r in ((64, 48, 4), (1000, 300, 32)):
        x = normal(n, m, 0, "arithmetic", dtype=torch.float32, device=device)
        for made in (x @ x.mT, x.mT @ x[:, :r].contiguous(), orthogonalise(x[:, :r].contiguous())):
            found = found * 31 + fingerprint(made)
    return found


_SMALL_BYTES = 4 << 20
_BLOCK_BYTES = 512 << 10


def _rows(x: Tensor) -> int:
    if x.device.type != "cpu" or x.nbytes <= _SMALL_BYTES:
        return max(1, x.shape[0])
    return max(16, _BLOCK_BYTES * x.shape[0] // x.nbytes)


def peel_left(a: Tensor, q: Tensor) -> Tensor:
    """Compute ``p = a q``, and in place ``a -= p qT``. ``a`` [n, m] contiguous, ``q`` [m, r]; returns [n, r]."""
    p = a.new_empty(a.shape[0], q.shape[1])
    if a.device.type == "meta":
        return p
    rows, columns = _rows(a), _by_columns(q)
    for block, out in zip(torch.split(a, rows), torch.split(p, rows)):
        torch.mm(block, columns, out=out)
        block.addmm_(out, q.mT, alpha=-1)
    return p


def peel_right(a: Tensor, p: Tensor) -> Tensor:
    """Compute ``q = aT p``, and in place ``a -= p qT``. ``a`` [n, m] contiguous, ``p`` [n, r]; returns [m, r]."""
    q = project_right(a, p)
    subtract(a, p, q)
    return q


def project_left(a: Tensor, q: Tensor) -> Tensor:
    if a.device.type == "meta":
        return a.new_empty(a.shape[0], q.shape[1])
    return a @ _by_columns(q)


def _by_columns(q: Tensor) -> Tensor:
    """Return ``q`` in column-major order: ``a q`` is then up to five times as fast on a CPU at rank 2 to 8."""
    return q.mT.contiguous().mT


def project_right(a: Tensor, p: Tensor) -> Tensor:
    """Return ``aT p``, computed as (pT a)T: 12 times as fast as the direct form on a CPU."""
    if a.device.type == "meta":
        return a.new_empty(p.shape[1], a.shape[1]).mT
    return (p.mT @ a).mT


def subtract(a: Tensor, p: Tensor, q: Tensor) -> None:
    if a.device.type == "meta":
        return
    rows = _rows(a)
    for block, left in zip(torch.split(a, rows), torch.split(p, rows)):
        block.addmm_(left, q.mT, alpha=-1)


def rebuild(p: Tensor, q: Tensor, out: Tensor) -> None:
    if out.device.type == "meta":
        return
    rows = _rows(out)
    for block, left in zip(torch.split(out, rows), torch.split(p, rows)):
        torch.mm(left, q.mT, out=block)
