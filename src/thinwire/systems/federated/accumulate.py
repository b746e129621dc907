"""The local sum of a device, in one of three arithmetics.

``fp32`` and ``fp64`` add floats, so another order of clients or devices can change the last bits (in fp64 rarely,
because the sum is rounded to fp32 once, but it can). ``exact`` adds integers in int64, the nearest to w x 2^40, so no
order changes a bit. Each term has an error of at most 2^-41, and the sum must stay below 2^22, which is checked before
use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.core.methods import base

MODES = ("fp32", "fp64", "exact")
_SCALE = 2.0**40
_LIMIT = 2.0**22
_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "exact": torch.int64}


def check_mode(mode: str) -> None:
    """Raise ``ValueError`` for an unknown arithmetic."""
    if mode not in MODES:
        raise ValueError(f"reduction={mode!r} is unknown; use one of {', '.join(MODES)}")


class Accumulator:
    """Weighted sums by name.

    Args:
        mode: "fp32", "fp64" or "exact".

    Attributes:
        sums: by name, in the dtype of the mode.
        bounds: by name, in exact mode: an upper bound on the largest magnitude in the sum.
    """

    def __init__(self, mode: str) -> None:
        check_mode(mode)
        self.mode = mode
        self.sums: dict[str, Tensor] = {}
        self.bounds: dict[str, float] = {}

    def add(self, name: str, x: Tensor, weight: float) -> None:
        """Add ``weight * x``. ``x`` is not kept."""
        x = x.detach()
        total = self.sums.get(name)
        if total is None:
            total = self.sums[name] = torch.zeros(x.shape, dtype=_DTYPE[self.mode], device=x.device)
            self.bounds[name] = 0.0
        elif total.shape != x.shape:
            raise ValueError(f"{name!r} has the shape {tuple(x.shape)} here, but {tuple(total.shape)} elsewhere")
        if self.mode != "exact":
            total.add_(x, alpha=weight)
            return
        scaled = x.double().mul_(weight)
        if scaled.numel():
            self.bounds[name] += float(scaled.abs().max())
        if self.bounds[name] < _LIMIT:  # beyond it the result is refused; avoid overflow until then
            total.add_(scaled.mul_(_SCALE).round_().to(torch.int64))

    def merge(self, other: Accumulator) -> None:
        """Add another device's sums."""
        for name, x in other.sums.items():
            if name in self.sums:
                self.sums[name] += x
                self.bounds[name] += other.bounds[name]
            else:
                self.sums[name], self.bounds[name] = x.clone(), other.bounds[name]

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes by name."""
        return {name: list(x.shape) for name, x in self.sums.items()}

    def flat(self, shapes: Mapping[str, list[int]], device: torch.device) -> Tensor:
        """Return all sums as one vector, in order of the names; zeros for sums that this device does not have."""
        dtype = _DTYPE[self.mode]
        parts = [
            self.sums[name].reshape(-1)
            if name in self.sums
            else torch.zeros(torch.Size(shapes[name]).numel(), dtype=dtype, device=device)
            for name in sorted(shapes)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)

    def take(self, flat: Tensor, shapes: Mapping[str, list[int]], bounds: Mapping[str, float]) -> None:
        """Set the sums from the vector that ``flat`` returned, after it was summed over devices."""
        at = 0
        for name in sorted(shapes):
            size = torch.Size(shapes[name]).numel()
            self.sums[name] = flat[at : at + size].view(shapes[name])
            self.bounds[name] = bounds[name]
            at += size

    def result(self, name: str, factor: float, dtype: torch.dtype) -> Tensor:
        """Return ``factor`` times a sum, rounded to ``dtype`` once.

        Raises:
            OverflowError: in exact mode, if the sum may have left its range.
        """
        total = self.sums[name]
        if self.mode == "exact":
            if not self.bounds[name] < _LIMIT:
                raise OverflowError(
                    f"{name!r} adds up to {self.bounds[name]:.3g}, but reduction='exact' can hold only 2^22: "
                    "use reduction='fp64', or find out why an update is so large"
                )
            total = total.double().mul_(1 / _SCALE)
        return (total * factor if factor != 1.0 else total.clone()).to(dtype)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether all elements of all tensors, on one device, are finite. Reads one value from the device."""
    flags = [base.all_finite(x.detach()) for x in tensors.values() if x.dtype.is_floating_point]
    return not flags or bool(torch.stack(flags).all())
