"""Make a plan: which factors are fused, who inverts what, and how it is sent. By default all by what is cheapest.

Others make plans by published rules (:mod:`thinwire.systems.kfac.published`), or of your own: a maker is given the
plainest plan and changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.merge import Price, fuse
from thinwire.core.pricing.optimal import optimal_dense
from thinwire.core.pricing.placement import place
from thinwire.core.program import WORLD
from thinwire.core.virtual_time import Line
from thinwire.systems.kfac.plan import TRANSPORTS, FactorLayer, KFACPlan
from thinwire.systems.kfac.prices import LayerTimes, inversion_cost, inversion_seconds

PlanMaker: TypeAlias = Callable[[KFACPlan, Costs, LayerTimes], KFACPlan]
"""Changes the plainest plan (that of D-KFAC) by costs, and by when factors are ready. Equal on every rank."""


def by_cost(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """Fuse by what ends first; invert all, the cheap or no factors on every rank, and send by what is cheapest."""
    plan = replace(plan, schedule="spd", overlap=True)
    if plan.world_size == 1:
        return plan
    plan = fused(plan, (optimal, up_to(math.inf), up_to(25 * 2**20), up_to(0)), costs, times)
    seconds = [inversion_seconds(costs, plan.method, plan.dim(i)) for i in range(len(plan.owners))]
    sizes = [plan.elements(i) * plan.layers[i // 2].itemsize for i in range(len(plan.owners))]
    sending = [costs.seconds("Broadcast", WORLD, plan.world_size, size) for size in sizes]
    shared = [place(seconds, plan.world_size, unless).owner for unless in (sending, None)]
    return cheapest([plan, *(replace(plan, owners=owners) for owners in shared)], costs)


def make_plan(
    layers: Sequence[FactorLayer],
    world_size: int,
    costs: Costs,
    times: LayerTimes | None = None,
    *,
    maker: PlanMaker = by_cost,
    method: str = "inverse",
) -> KFACPlan:
    """Return a maker's plan. The same arguments give the same plan on every rank.

    Args:
        layers: in forward order.
        costs: of exchanges ("AllReduce", "Broadcast", "AllGather" in the world) and of inversions.
        times: when factors are ready; None: all at the same time.
        maker: one of :mod:`thinwire.kfac.published`, or your own; by default what is cheapest.
        method: "inverse", "inverse_pi" or "eigen".

    Raises:
        ValueError: KAISA's fraction does not match the number of ranks.
        LookupError: the maker asks for a price that the costs do not hold.
    """
    times, everyone = times or LayerTimes.unknown(len(layers)), (-1,) * (2 * len(layers))
    plan = KFACPlan(tuple(layers), world_size, "dkfac", method, (), (), False, True, world_size, everyone)
    made = maker(fused(plan, (up_to(math.inf),), costs, times), costs, times)
    return made if world_size > 1 else replace(made, owners=everyone)


def cheapest(plans: Iterable[KFACPlan], costs: Costs) -> KFACPlan:
    """Return the cheapest of all plans and transports; the first among equals."""
    offers = [replace(plan, transport=transport) for plan in plans for transport in TRANSPORTS]
    return min(offers, key=lambda plan: sum(inversion_cost(costs, plan)))


Groups: TypeAlias = Sequence[Sequence[int]]
Fusion: TypeAlias = Callable[[Sequence[int], Sequence[float], Price, Sequence[int]], Groups]
"""Groups by elements, seconds from one to the next, the price of elements, and bytes an element, in order."""
GRADIENT_BYTES = 4 << 20  # of one message of gradients


def optimal(sizes: Sequence[int], seconds: Sequence[float], price: Price, itemsizes: Sequence[int]) -> Groups:
    return optimal_dense(sizes, seconds, price, breaks=_breaks(itemsizes)).groups


def up_to(limit: float) -> Fusion:
    """Return a fusion by size alone: a message has at most so many bytes."""
    return lambda sizes, _seconds, _price, itemsizes: fuse(
        [itemsize * size for itemsize, size in zip(itemsizes, sizes)], limit, _breaks(itemsizes)
    )


def _breaks(itemsizes: Sequence[int]) -> list[int]:
    return [n for n in range(1, len(itemsizes)) if itemsizes[n] != itemsizes[n - 1]]


def fused(plan: KFACPlan, rules: Sequence[Fusion], costs: Costs, times: LayerTimes) -> KFACPlan:
    """Return the plan with messages of A (sent in the order of forward) and of G (of backward), by the best rules.

    The published rule, and the optimum for one direction alone, assume a free link. But gradients are sent during
    backward too, and A may still be on the link when G is ready: best is what ends first with all on one link.
    """
    of_a, of_g = ([_one_direction(rule, plan, side, costs, times) for rule in rules] for side in (0, 1))
    offers = [replace(plan, a_buckets=a, g_buckets=g) for a in of_a for g in of_g]
    if len(offers) == 1:  # no choice, so no costs needed
        return offers[0]
    return min(offers, key=lambda offer: end_seconds(offer, costs, times))


def _one_direction(
    rule: Fusion, plan: KFACPlan, side: int, costs: Costs, times: LayerTimes
) -> tuple[tuple[int, ...], ...]:
    """Return the messages of A (0) or G (1), as if they had the link to themselves. Each message has one dtype."""
    order, steps = (times.g_order, times.g_steps) if side else (times.a_order, times.a_steps)
    layers = [plan.layers[i] for i in order]
    itemsizes = [layer.itemsize for layer in layers]

    def price(elements: int) -> float:
        return costs.seconds("AllReduce", WORLD, plan.world_size, max(itemsizes) * elements)

    groups = rule([layer.packed(side) for layer in layers], [steps[i] for i in order], price, itemsizes)
    return tuple(tuple(order[n] for n in group) for group in groups)


def end_seconds(plan: KFACPlan, costs: Costs, times: LayerTimes) -> float:
    """Return when the last message of a pass has arrived: A, G and gradients, first come, first served on one link."""
    ready_a = dict(zip(times.a_order, accumulate(times.a_steps[i] for i in times.a_order)))
    forward = sum(times.a_steps)
    ready_g = dict(zip(times.g_order, accumulate(times.g_steps[i] for i in times.g_order)))

    def size(i: int, side: int) -> int:
        return plan.layers[i].packed(side) * plan.layers[i].itemsize

    leaving = [(max(ready_a[i] for i in group), sum(size(i, 0) for i in group)) for group in plan.a_buckets]
    leaving += [(forward + max(ready_g[i] for i in group), sum(size(i, 1) for i in group)) for group in plan.g_buckets]
    filled = 0
    for i in times.g_order:
        filled += plan.layers[i].d_a * plan.layers[i].d_g * plan.layers[i].itemsize
        if filled >= GRADIENT_BYTES or i == times.g_order[-1]:
            leaving.append((forward + ready_g[i], filled))
            filled = 0
    link = Line()
    for ready, message in sorted(leaving):
        link.carry(ready, costs.seconds("AllReduce", WORLD, plan.world_size, message))
    return link.free_at
