"""How long this device takes to invert or decompose a symmetric matrix, by its side.

Measured from the packed triangle and, for inverses, back to one, as K-FAC keeps factors and sends inverses: at a side
of 512, packing and unpacking take half as long again as the inversion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.core.kernels.symmetric import damped_eigen, damped_inverse, pack_upper, unpack_upper
from thinwire.core.pricing.curves import Provenance, Table
from thinwire.predict.measure.fit import never_falling
from thinwire.predict.measure.timing import Clock, median_seconds

KINDS = ("inverse", "eigen")
"""The curves, named as in ``planner.Costs.compute``."""
_SMALLEST = 64
_BETWEEN = 4  # interpolation points in each doubling

Point = tuple[int, float]


def sides(largest: int) -> list[int]:
    """Return 64, 128, ... up to the first that is at least ``largest``."""
    if largest < 1:
        raise ValueError(f"largest={largest} must be the side of a matrix, at least 1")
    return [_SMALLEST << n for n in range(max(0, math.ceil(math.log2(largest / _SMALLEST))) + 1)]


def inversion_points(
    kind: str,
    device: torch.device,
    *,
    largest: int = 4096,
    seconds: float = 5.0,
    clock: Clock = time.perf_counter,
    on_point: Callable[[int], None] = lambda d: None,
) -> list[Point]:
    """Return (side, seconds) at each of ``sides(largest)``, always the same sides however long they take.

    Args:
        kind: "inverse" or "eigen".
        device: device to measure.
        largest: largest side to cover.
        seconds: total time; a side that would not fit is estimated as the previous one times eight.
        on_point: called with each side before it is measured.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    began, found = clock(), list[Point]()
    for d in sides(largest):
        expected = 8 * found[-1][1] if found else 0.0
        left = seconds - (clock() - began)
        if found and 2 * expected > left:
            found.append((d, expected))
            continue
        on_point(d)
        draw = torch.Generator(device).manual_seed(d)
        rows = torch.randn(2 * d, d, device=device, generator=draw)
        packed = pack_upper(rows.mT @ rows / (2 * d))
        call = partial(_inverted if kind == "inverse" else _decomposed, packed)
        found.append((d, median_seconds(call, device, seconds=left / 8, least=1, most=7, clock=clock)))
    return found


def _inverted(packed: Tensor) -> Tensor:
    return pack_upper(damped_inverse(unpack_upper(packed), 1e-2)[0])


def _decomposed(packed: Tensor) -> Tensor:
    return damped_eigen(unpack_upper(packed))[0]


def curve(points: Sequence[Point], provenance: Provenance, source: str) -> Table:
    """Return a table over the side, linear in the logarithms of both: with points between, and one beyond by d^3."""
    known = never_falling([(float(d), s) for d, s in points])
    rising = [*known, (2 * known[-1][0], 8 * known[-1][1])]
    dense: list[tuple[float, float]] = []
    for (d0, s0), (d1, s1) in pairwise(rising):
        steps = [n / _BETWEEN for n in range(_BETWEEN)]
        dense += [(d0 * (d1 / d0) ** t, s0 * (s1 / s0) ** t if s0 > 0 else s0 + t * (s1 - s0)) for t in steps]
    return Table((*dense, rising[-1]), provenance, source)
