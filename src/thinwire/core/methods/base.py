"""What methods share: the sum over ranks, the dense average, error feedback, verdicts, option checks.

Error feedback: what a lossy method did not send is kept, in gradient units, and added to the next gradient. E <- A -
(what *this rank* sent, decoded), A = M + E. Then mean A = G + mean E holds at every step (G: what is applied), so
nothing is lost, only delayed. Residuals are kept per parameter name, in fp32, without the loss scale.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_count
from thinwire.core.kernels.finite import all_finite as all_finite
from thinwire.core.methods.exchanges import over_nodes, padded
from thinwire.core.pricing.merge import Merge
from thinwire.core.program import AllGather, AllReduce, Bucket, ReduceScatter, Slot, State
from thinwire.core.program.bucket import LARGE, LARGE_ON_CARD, joined


def check_fusion(fusion: Any, *, sparse: bool = False) -> None:
    """Refuse all but a known word, a number of MiB, or a ``Merge``. ``sparse``: of OMGS, not MG-WFBP."""
    words = ("auto", "none", "single", "optimal", "omgs" if sparse else "mgwfbp", "tune")
    if isinstance(fusion, Merge):
        return
    if isinstance(fusion, str):
        if fusion not in words:
            raise ValueError(f"fusion={fusion!r} is unknown; use a number of MiB or one of {', '.join(words)}")
    elif isinstance(fusion, bool) or not isinstance(fusion, (int, float)) or not fusion > 0:
        raise ValueError(f"fusion={fusion!r} must be a positive number of MiB or one of {', '.join(words)}")


def all_reduce(
    x: Tensor, state: State, *, deterministic: bool, collective: str = "flat"
) -> Generator[Any, Tensor, Tensor]:
    """Sum over the world; owns ``x``. ``deterministic``: in rank order, by reduce-scatter and all-gather."""
    if deterministic:
        size = x.numel()
        shard = yield ReduceScatter(padded(x, state.size))
        everyone = yield AllGather(shard)
        return everyone.reshape(-1)[:size].view(x.shape)
    if collective != "flat" and (sums := over_nodes(collective, x.numel(), state.topology)):
        return (yield from sums(x, state))
    return (yield AllReduce(x))


def poison(finite: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Return ``value``, or NaN if the verdict is False, so that every scaler skips the step."""
    if finite.device.type == "meta":
        return torch.empty((), dtype=dtype, device="meta")
    return torch.where(finite, value, torch.nan).to(dtype)


def average_flat(
    bucket: Bucket, state: State, *, deterministic: bool, watch: bool = False, collective: str = "flat"
) -> Generator[Any, Tensor, None]:
    """Run the program of S-SGD; ``watch=True``: with a verdict, for methods that keep residuals in other buckets.

    Divides before the sum, as DDP does: that costs no pass of its own, and 16 bits cannot overflow.
    """
    if bucket.numel == 0:
        return
    total = yield from all_reduce(bucket.shares(state.size), state, deterministic=deterministic, collective=collective)
    if watch:
        state.verdict(all_finite(total))
    bucket.write(total)


@dataclass(frozen=True)
class Warmup:
    """Density warm-up: stage e of s, each of some steps, keeps ``rho ** ((e + 1) / (s + 1))``, then rho."""

    steps_per_stage: int
    stages: int = 4

    def __post_init__(self) -> None:
        check_count("steps_per_stage", self.steps_per_stage, 1)
        check_count("stages", self.stages, 1)

    def density(self, rho: float, step: int) -> float:
        """Return the density at a step.

        Example:
            >>> [round(Warmup(10).density(0.001, step), 4) for step in (0, 10, 20, 30, 40)]
            [0.2512, 0.0631, 0.0158, 0.004, 0.001]
        """
        stage = step // self.steps_per_stage
        return float(rho ** ((stage + 1) / (self.stages + 1))) if stage < self.stages else rho


def accumulate(slot: Slot, state: State, out: Tensor | None = None) -> Tensor:
    """Return A = M + E in one pass: its shape, contiguous, working dtype, unscaled; no memory of ``.grad`` or E."""
    residual = state.residual(slot)
    if out is None:
        out = state.spare([slot]).view(slot.shape)
    if out.device.type == "meta":
        return out
    if slot.value is None:
        return out.copy_(residual)
    if slot.scale is None:
        return torch.add(residual, slot.value, out=out)
    return torch.addcdiv(residual, slot.value.to(residual.dtype), slot.scale.to(residual.dtype), out=out)


def accumulate_all(slots: Sequence[Slot], state: State, pieces: Sequence[Tensor]) -> None:
    """Compute A = M + E into ``pieces`` in few calls; large ones singly, in one pass instead of two."""
    large = LARGE if pieces[0].device.type == "cpu" else LARGE_ON_CARD
    together = []
    for slot, piece in zip(slots, pieces):
        if slot.value is None or piece.device.type == "meta" or slot.numel >= large:
            accumulate(slot, state, piece)
        else:
            together.append((slot, piece, slot.value))
    if together:
        sums = [piece for _, piece, _ in together]
        torch._foreach_copy_(sums, [value for _, _, value in together])
        scale, held = together[0][0].scale, [state.residual(slot) for slot, _, _ in together]
        if (flat := joined(sums)) is not None and (kept := joined(held)) is not None:
            torch.add(kept, flat, out=flat) if scale is None else torch.addcdiv(kept, flat, scale.to(kept), out=flat)
            return
        if scale is not None:
            torch._foreach_div_(sums, scale)
        torch._foreach_add_(sums, held)


def accumulate_flat(bucket: Bucket, state: State, size: int | None = None) -> Tensor:
    """Return A = M + E of a whole bucket, 1-D, padded with zeros to ``size`` elements."""
    out = state.spare(bucket.slots, size=size)
    accumulate_all(bucket.slots, state, bucket.split(out[: bucket.numel]))
    if out.numel() > bucket.numel:
        out[bucket.numel :].zero_()
    return out


def stage_flat(bucket: Bucket, state: State, residual: Tensor) -> None:
    """Stage the residuals of a whole bucket (1-D; the state keeps views of it)."""
    for slot, piece in zip(bucket.slots, bucket.split(residual)):
        state.stage(slot.name, residual=piece)
