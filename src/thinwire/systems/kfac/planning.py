"""The plan of a running K-FAC: the first from costs, a second from measured times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.core.pricing.costs import Costs
from thinwire.engine.sync import GradientSync
from thinwire.predict.measure.kernels import curve, inversion_points, sides
from thinwire.systems.kfac.assignment import make_plan
from thinwire.systems.kfac.capture import Capture
from thinwire.systems.kfac.exchange import gather
from thinwire.systems.kfac.plan import FactorLayer, KFACPlan
from thinwire.systems.kfac.prices import LayerTimes, curve_name
from thinwire.systems.kfac.variant import Variant

logger = logging.getLogger("thinwire")
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
    for side, usual in enumerate((range(layers), reversed(range(layers)))):
        order[side] += [i for i in usual if i not in order[side]]
    row = [*steps[0], *steps[1], *own[0], *own[1], *map(float, order[0]), *map(float, order[1])]
    everyone = _gathered(sync, row)
    slowest = everyone[:, : 4 * layers].max(0).values.view(4, layers).tolist()
    first = everyone[0, 4 * layers :].view(2, layers).long().tolist()
    a_steps, g_steps, a_factor, g_factor = (tuple(part) for part in slowest)
    return LayerTimes(a_steps, g_steps, a_factor, g_factor, tuple(first[0]), tuple(first[1]))


def _gathered(sync: GradientSync, row: Sequence[float]) -> Tensor:
    found: Tensor = sync.services.run(gather(torch.tensor(row, dtype=torch.float64, device=sync.services.device)))
    return found.cpu()


def first_plan(
    ranks: GradientSync | None,
    shapes: tuple[FactorLayer, ...],
    variant: Variant,
    method: str,
    device: torch.device,
    facts: Mapping[str, Any],
) -> tuple[KFACPlan, Costs | None]:
    """Return the pinned plan, or a made one and the costs that its maker asked for. Agree on it and on ``facts``."""
    world = ranks.services.topology.world_size if ranks is not None else 1
    plan, costs = variant.plan, None
    if not isinstance(plan, KFACPlan):
        made = partial(make_plan, shapes, world, maker=variant.maker, method=method)
        try:
            plan = made(Costs({}))
        except LookupError:  # it asks for prices
            costs = variant.costs
            if costs is None:
                if ranks is None:
                    raise
                costs = measured_costs(ranks, shapes, method)
            plan = made(costs)
        plan = replace(plan, wire_dtype=variant.wire_dtype)
    if device.type == "cuda":  # two NCCL communicators must be used in one order on all ranks
        plan = replace(plan, overlap=False)
    plan.check(shapes, world, method=method)
    if ranks is not None:
        ranks.services.agree_on({"K-FAC": {"plan": plan.to_json(), **facts}})
    return plan, costs


def second_plan(plan: KFACPlan, ranks: GradientSync, variant: Variant, costs: Costs, capture: Capture) -> KFACPlan:
    """Plan once more, from the times of the second round: other messages, the same owners."""
    times = agreed_times(ranks, capture, len(plan.layers))
    made = make_plan(plan.layers, plan.world_size, costs, times, maker=variant.maker, method=plan.method)
    if ranks.services.rank == 0:
        words = "thinwire: K-FAC: A in %d messages, G in %d, from measured times"
        logger.info(words, len(made.a_buckets), len(made.g_buckets))
    return replace(plan, a_buckets=made.a_buckets, g_buckets=made.g_buckets)
