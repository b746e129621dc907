"""Measurements for a plan: the network, inversions, and when the factors of a step are ready.

All ranks take part, and the slowest rank's times count, so that all make the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.core.pricing.costs import Costs
from thinwire.core.program import WORLD, AllGather, Program
from thinwire.engine.sync import GradientSync
from thinwire.predict.measure.kernels import curve, inversion_points, sides
from thinwire.systems.kfac.capture import Capture
from thinwire.systems.kfac.plan import FactorLayer
from thinwire.systems.kfac.prices import curve_name
from thinwire.systems.kfac.times import LayerTimes

_SECONDS = 2.0


def measured_costs(sync: GradientSync, layers: Sequence[FactorLayer], method: str) -> Costs:
    """Measure exchanges on this network, and inversions of these sizes on all ranks at once."""
    known = sync.services.probe(largest_bytes=4 << 20, seconds=_SECONDS)
    largest = max(max(layer.d_a, layer.d_g) for layer in layers)
    device = sync.services.device
    sync.services.agree(False)  # start together
    points = inversion_points(curve_name(method), device, largest=largest, seconds=_SECONDS)
    slowest = _gathered(sync, [seconds for _, seconds in points]).max(0).values.tolist()
    table = curve(list(zip(sides(largest), slowest)), "measured here", "at the start of K-FAC, the slowest rank's")
    return replace(known, compute={**known.compute, curve_name(method): table})


def agreed_times(sync: GradientSync, capture: Capture, layers: int) -> LayerTimes:
    """Return when the factors of the measured round were ready: the slowest rank's times, in rank 0's order."""
    capture.watch.settle()
    steps, own = ([[0.0] * layers, [0.0] * layers] for _ in range(2))
    order: list[list[int]] = [[], []]
    before: list[object] = [None, None]
    for layer, side, begin, end in capture.marks:
        since = begin if before[side] is None else before[side]
        steps[side][layer] += capture.watch.between(since, end)
        own[side][layer] += capture.watch.between(begin, end)
        before[side] = end
        if layer in order[side]:  # called several times: the last call completes its factor
            order[side].remove(layer)
        order[side].append(layer)
    capture.marks.clear()
    usual = list(range(layers)), list(range(layers))[::-1]
    for side in (0, 1):
        order[side] += [i for i in usual[side] if i not in order[side]]
    row = [*steps[0], *steps[1], *own[0], *own[1], *map(float, order[0]), *map(float, order[1])]
    everyone = _gathered(sync, row)
    slowest = everyone[:, : 4 * layers].max(0).values.view(4, layers).tolist()
    first = everyone[0, 4 * layers :].view(2, layers).long().tolist()
    a_steps, g_steps, a_factor, g_factor = (tuple(part) for part in slowest)
    return LayerTimes(a_steps, g_steps, a_factor, g_factor, tuple(first[0]), tuple(first[1]))


def _gathered(sync: GradientSync, row: Sequence[float]) -> Tensor:
    """Return every rank's row of numbers, ``[W, n]``, on the CPU."""
    found: Tensor = sync.services.run(_gather(torch.tensor(row, dtype=torch.float64, device=sync.services.device)))
    return found.cpu()


def _gather(x: Tensor) -> Program:
    return (yield AllGather(x, WORLD))
