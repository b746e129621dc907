"""Error feedback: what a lossy method did not send is kept, in gradient units, and added to the next gradient.

E <- A - (what *this rank* sent, decoded), A = M + E. Then mean A = G + mean E holds at every step (G: what is applied),
so nothing is lost, only delayed. Residuals are kept per parameter name, in fp32, without the loss scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.methods.base import check_count
from thinwire.core.program import Bucket, Slot, State
from thinwire.core.program.bucket import LARGE


@dataclass(frozen=True)
class Warmup:
    """Density warm-up: stage e of s keeps ``rho ** ((e + 1) / (s + 1))``, then rho.

    Args:
        steps_per_stage: synchronised steps per stage.
        stages: number of stages.
    """

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
    """Return A = M + E of one parameter, in one pass: contiguous, in its shape, working dtype, unscaled.

    The program may edit it and stage it as the next residual: it shares no memory with ``.grad`` or E.
    """
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
    """Compute A = M + E of some parameters, into memory of their shapes.

    One call serves all; on a CPU, large ones are done separately, in one pass instead of two.
    """
    together = []
    for slot, piece in zip(slots, pieces):
        if slot.value is None or piece.device.type == "meta" or (piece.device.type == "cpu" and slot.numel >= LARGE):
            accumulate(slot, state, piece)
        else:
            together.append((slot, piece, slot.value))
    if together:
        sums = [piece for _, piece, _ in together]
        torch._foreach_copy_(sums, [value for _, _, value in together])
        scale = together[0][0].scale
        if scale is not None:
            torch._foreach_div_(sums, scale)
        torch._foreach_add_(sums, [state.residual(slot) for slot, _, _ in together])


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
