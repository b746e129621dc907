"""What methods that send the largest entries share: options, selection, the all-gather of pairs, delivery."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_choice
from thinwire.core.kernels.pairs import WIRES, add_pairs, message_bytes, pack, to_wire, unpack
from thinwire.core.kernels.seeding import generator
from thinwire.core.kernels.select import ALGORITHMS, top_k
from thinwire.core.methods.base import Warmup, all_finite, poison
from thinwire.core.program import AllGather, Bucket, State, working_dtype


def check_options(density: Any, select: Any, value_dtype: Any, warmup: Any) -> None:
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} must be a number above 0 and at most 1")
    check_choice("select", select, tuple(ALGORITHMS))
    check_choice("value_dtype", value_dtype, tuple(WIRES))
    if warmup is not None and not isinstance(warmup, Warmup):
        raise ValueError(f"warmup={warmup!r} must be a Warmup or None")


def message_units(kept: Iterable[int], wire: str) -> list[int]:
    """Return the sizes of messages of that many pairs each, in units of fp32 elements: 2 k for fp32 values."""
    return [message_bytes(k, WIRES[wire]) // 4 for k in kept]


def stays_dense(shape: Sequence[int], embedding: bool) -> bool:
    """Return True for vectors and embeddings: they are small, or sparse already."""
    return len(shape) < 2 or embedding


def check_size(bucket: Bucket) -> None:
    """Raise ``ValueError`` if an index does not fit into its 32 bits."""
    if bucket.numel > 2**31 - 1:
        raise ValueError(f"bucket {bucket.index} has {bucket.numel} elements; indices are int32: use smaller buckets")


def choose(a: Tensor, k: int, select: str, bucket: Bucket, state: State) -> tuple[Tensor, Tensor]:
    """Return the k entries of ``a`` ``[d]`` to send: values, all NaN if any of ``a`` is not finite, and indices."""
    draw = None if select == "exact" or a.device.type == "meta" else generator("select", bucket.index, state.step)
    values, indices = top_k(a, k, select, draw)
    finite = all_finite(values if select == "exact" else a)  # exact selection puts non-finite entries first
    return torch.where(finite, values, torch.nan), indices


def all_gather_pairs(
    values: Tensor, indices: Tensor, wire: torch.dtype
) -> Generator[Any, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Send k pairs to all ranks.

    Returns:
        Values and indices of all ranks ``[P, k]``; the rounding errors of this rank's values as sent ``[k]``.
    """
    sent = to_wire(values, wire)
    parts = yield AllGather(pack(sent, indices))
    everyone, places = unpack(parts, indices.numel(), wire)
    return everyone.to(values.dtype), places, values - sent.to(values.dtype)


def deliver(bucket: Bucket, values: Tensor, indices: Tensor, finite: Tensor, ranks: int) -> None:
    """Write the sum of pairs over ``ranks``, in the gradient's own memory if its dtype allows.

    Args:
        values, indices: ``[rows, k]``, or ``[k]`` padded with index -1.
        finite: the verdict; if it is False, everything becomes NaN.
    """
    dtype = working_dtype(bucket.dtype)
    direct = bucket.dtype == dtype
    out = bucket.flat if direct else torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
    if direct and bucket.scale is not None:
        values = values * bucket.scale
    average_pairs(out, values, indices, finite, ranks)
    if direct:
        bucket.write(out)
    else:
        bucket.write_gradient(out)


def average_pairs(out: Tensor, values: Tensor, indices: Tensor, finite: Tensor, ranks: int) -> Tensor:
    """Overwrite ``out`` ``[d]`` with the sum of pairs over ``ranks``; see :func:`deliver`."""
    out.fill_(poison(finite, 0.0, out.dtype))
    if indices.ndim == 1:
        values, indices = values[None], indices.clamp(min=0)[None]
    add_pairs(out, values, indices)
    if indices.numel() < out.numel():
        touched = indices.reshape(-1)
        out[touched] = out[touched] / ranks
    else:
        out.div_(ranks)
    return out
