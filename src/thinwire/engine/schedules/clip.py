"""The norm of the averaged gradients, over the same parts in the same order on every schedule: bit for bit the same.

A bucket, padded with zeros, is cut into as many parts as there are ranks. Powers of elements are added in fp64: within
each part, then over the buckets of one rank's parts, then over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.core.methods.exchanges import padded
from thinwire.core.program import Bucket
from thinwire.core.program.ops import Paused
from thinwire.engine.buckets import Buckets
from thinwire.engine.schedules.deferred_grad import Change


def check_norm_type(norm_type: float) -> float:
    """Return ``norm_type`` as a float. Raise ``ValueError`` unless it is above 0."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0; float('inf') is the largest element")
    return norm_type


def power(x: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a 1-D tensor to the power of its type (the maximum for inf), in fp64."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    norm: Tensor = torch.linalg.vector_norm(x, norm_type, dtype=torch.float64)
    return norm if math.isinf(norm_type) else norm**norm_type


def add(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    """Return the power of two parts together."""
    return torch.maximum(a, b) if math.isinf(norm_type) else a + b


def total(powers: Tensor, norm_type: float, dtype: torch.dtype, error_if_nonfinite: bool) -> Tensor:
    """Return the norm of all ranks' parts, 0-dim, from their powers ``[W]`` in rank order."""
    found = powers[0]
    for other in powers[1:]:
        found = add(found, other, norm_type)
    norm = found if math.isinf(norm_type) else found ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for the gradients is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm.to(dtype)


def norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a norm over gradients: that of all, or, if there are several, fp32 or wider."""
    kinds = {*dtypes}
    return kinds.pop() if len(kinds) == 1 else torch.float64 if torch.float64 in kinds else torch.float32


def scaling(norm: Tensor, max_norm: float) -> Change:
    """Return the in-place change by which clipping to a norm scales gradients, by torch's formula."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def change(gradients: list[Tensor]) -> None:
        torch._foreach_mul_(gradients, factor)

    return change


def whole(buckets: Buckets, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clip gradients that every rank holds in full. Return the norm, 0-dim.

    Args:
        buckets: of the model.
        max_norm, norm_type, error_if_nonfinite: as for ``torch.nn.utils.clip_grad_norm_``.
    """
    state, by_name = buckets.session.state, buckets.parameters.by_name
    ranks, last = state.size, buckets.plan.buckets(max(0, state.turn - 1))
    device = by_name[last[0].names[0]].parameter.device
    powers = torch.zeros(ranks, dtype=torch.float64, device=device)
    gradients: list[Tensor] = []
    for entry in last:
        parameters = [by_name[name].parameter for name in entry.names]
        here = [p.grad for p in parameters if p.grad is not None]
        gradients += here
        if not here:
            continue
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        for rank, part in enumerate(padded(flat.detach(), ranks).view(ranks, -1)):
            powers[rank] = add(powers[rank], power(part, norm_type), norm_type)
    norm = total(powers, norm_type, norm_dtype(p.dtype for p in gradients), error_if_nonfinite)
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault(gradient.dtype, []).append(gradient)
    change = scaling(norm, max_norm)
    with torch.no_grad():
        for some in by_kind.values():
            change(some)
    return norm


def delivered(paused: Paused, bucket: Bucket, rank: int, ranks: int, norm_type: float) -> Tensor:
    """Return a copy of this rank's part of a scattered bucket, 1-D, as delivered except for scaler and clipping.

    Raises:
        ValueError: the part is a low-rank factor, whose norm equals the gradient's for type 2 only.
    """
    pause = paused.pause
    part: Tensor = paused.shard.to(bucket.dtype, copy=True)
    if pause.sums and norm_type != 2.0:
        raise ValueError(f"norm_type={norm_type}: for low-rank factors only the norm of type 2 equals the gradient's")
    if pause.sums:
        part[: max(0, pause.sums - rank * part.numel())] /= ranks
    if pause.unscaled and bucket.scale is not None:
        part *= bucket.scale
    return part
