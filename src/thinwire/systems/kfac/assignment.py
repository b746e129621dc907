"""Turn the name of a schedule into a plan: which factors are fused, who inverts what, and how it is sent.

Sources: D-KFAC and SPD-KFAC, Shi, Zhang and Li 2021 (arXiv 2107.06533; the exact rules are those of the authors' code,
shyhuai/kfac_pytorch); MPD-KFAC, Osawa et al. 2019, Pauloski et al. 2020; KAISA, Pauloski et al. 2021 (arXiv
2107.01739); DP-KFAC, Zhang, Shi et al. 2022 (arXiv 2206.15143).

Differences from the papers: an exact optimum for fusion and placement by measured cost are the defaults, the published
rules are options; the decomposition's eigenvalues are sent instead of a d_G x d_A table, so A and G need not have the
same owner; DP-KFAC is KAISA with one worker per layer, whose owner uses its own batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.merge import fuse, greedy_mgwfbp
from thinwire.core.pricing.optimal import optimal_dense
from thinwire.core.pricing.placement import place, place_threshold
from thinwire.core.program import WORLD
from thinwire.core.virtual_time import Line
from thinwire.systems.kfac.plan import TRANSPORTS, FactorLayer, KFACPlan
from thinwire.systems.kfac.prices import LayerTimes, inversion_cost, inversion_seconds
from thinwire.systems.kfac.variant import Variant


def make_plan(
    layers: Sequence[FactorLayer],
    world_size: int,
    variant: Variant,
    costs: Costs,
    times: LayerTimes | None = None,
    *,
    method: str = "inverse",
) -> KFACPlan:
    """Return the plan of a schedule. The same arguments give the same plan on every rank.

    Args:
        layers, world_size, variant: the layers in forward order.
        costs: of exchanges ("AllReduce", "Broadcast", "AllGather" in the world) and of inversions.
        times: when factors are ready; None: all at the same time.
        method: "inverse", "inverse_pi" or "eigen".

    Raises:
        ValueError: KAISA's fraction does not match the number of ranks.
        LookupError: the costs hold no exchange.
    """
    layers, name = tuple(layers), variant.schedule.partition(":")[0]
    workers, exchange = variant.workers(world_size), name != "dp"
    a: Buckets = ()
    g: Buckets = ()
    if exchange:
        planner = {"spd": variant.planner, "kaisa": "fixed:25MB"}.get(name, "one") if world_size > 1 else "one"
        a, g = fused(planner, layers, world_size, costs, times or LayerTimes.unknown(len(layers)))
    plan = KFACPlan(
        layers, world_size, variant.schedule, method, a, g, name in ("spd", "kaisa"), exchange, workers,
        (-1,) * (2 * len(layers)), "broadcast" if variant.inverse_comm == "auto" else variant.inverse_comm,
        variant.wire_dtype,
    )  # fmt: skip
    return _placed(plan, name, variant, costs)


def _placed(plan: KFACPlan, name: str, variant: Variant, costs: Costs) -> KFACPlan:
    world = plan.world_size
    if name == "dkfac" or world == 1:
        return plan
    if name == "mpd":
        return replace(plan, owners=tuple(i % world for i in range(len(plan.layers)) for _ in range(2)))
    if name in ("kaisa", "dp"):
        plan = replace(plan, owners=_in_groups(plan))
        return plan if plan.workers == 1 else _cheapest([plan], variant, costs)
    return _cheapest([replace(plan, owners=o) for o in _candidates(plan, variant, costs)], variant, costs)


def _in_groups(plan: KFACPlan) -> tuple[int, ...]:
    """Assign layers to groups, then their factors to the group's ranks, both longest first with d^3 as cost."""
    groups = plan.world_size // plan.workers
    of_layer = place([float(x.d_a) ** 3 + float(x.d_g) ** 3 for x in plan.layers], groups).owner
    owners = [-1] * (2 * len(plan.layers))
    for group in range(groups):
        items = [i for i in range(len(owners)) if of_layer[i // 2] == group]
        inside = place([float(plan.dim(i)) ** 3 for i in items], plan.workers).owner
        for item, rank in zip(items, inside):
            owners[item] = group * plan.workers + rank
    return tuple(owners)


def _candidates(plan: KFACPlan, variant: Variant, costs: Costs) -> list[tuple[int, ...]]:
    """Return owners by the rule; "cost" gives three candidates: all, cheap or no factors are inverted everywhere."""
    dims = [plan.dim(i) for i in range(len(plan.owners))]
    world = plan.world_size
    seconds = [inversion_seconds(costs, plan.method, d) for d in dims]
    power = {"cost": 0, "d": 1, "d2": 2, "d3": 3}[variant.inverse_weight]
    weights = [float(d) ** power for d in dims] if power else seconds
    rule = variant.inverse_rule
    if rule == "all":
        return [plan.owners]
    if rule.startswith("threshold:"):
        return [place_threshold(dims, world, int(rule.partition(":")[2]), weights).owner]
    nobody = place(weights, world).owner
    if rule == "none":
        return [nobody]
    sizes = [plan.elements(i) * plan.layers[i // 2].itemsize for i in range(len(dims))]
    sending = [costs.seconds("Broadcast", WORLD, world, size) for size in sizes]
    dearer = [i for i in range(len(dims)) if not seconds[i] < sending[i]]
    some = [-1] * len(dims)
    for i, owner in zip(dearer, place([weights[i] for i in dearer], world).owner):
        some[i] = owner
    return [plan.owners, tuple(some), nobody]


def _cheapest(plans: Sequence[KFACPlan], variant: Variant, costs: Costs) -> KFACPlan:
    """Return the cheapest of all plans and transports; the first among equals."""
    transports = TRANSPORTS if variant.inverse_comm == "auto" else (variant.inverse_comm,)
    offers = [replace(plan, transport=transport) for plan in plans for transport in transports]
    if len(offers) == 1:  # no choice, so no costs needed
        return offers[0]
    return min(offers, key=lambda plan: sum(inversion_cost(costs, plan)))


Buckets = tuple[tuple[int, ...], ...]
GRADIENT_BYTES = 4 << 20  # of one message of gradients


def fused(
    planner: str, layers: Sequence[FactorLayer], world: int, costs: Costs, times: LayerTimes
) -> tuple[Buckets, Buckets]:
    """Return the messages of A (sent in the order of forward) and of G (of backward), as indices of layers.

    The published rule, and the optimum for one direction alone, assume a free link. But gradients are sent during
    backward too, and A may still be on the link when G is ready: "optimal" takes what ends first with all on one link.
    """
    rules = ("optimal", "one", "fixed:25MB", "layer") if planner == "optimal" else (planner,)
    of_a, of_g = ([one_direction(rule, layers, side, world, costs, times) for rule in rules] for side in (0, 1))
    pairs = [(x, y) for x in of_a for y in of_g]
    if len(pairs) == 1:  # no choice, so no costs needed
        return pairs[0]
    return min(pairs, key=lambda pair: end_seconds(pair[0], pair[1], layers, world, costs, times))


def one_direction(
    planner: str, layers: Sequence[FactorLayer], side: int, world: int, costs: Costs, times: LayerTimes
) -> Buckets:
    """Return the messages of A (0) or G (1), as if they had the link to themselves. Each message has one dtype."""
    order, steps = (times.g_order, times.g_steps) if side else (times.a_order, times.a_steps)
    sizes, seconds = [layers[i].packed(side) for i in order], [steps[i] for i in order]
    itemsizes = [layers[i].itemsize for i in order]
    breaks = [n for n in range(1, len(order)) if itemsizes[n] != itemsizes[n - 1]]

    def price(elements: int) -> float:
        return costs.seconds("AllReduce", WORLD, world, max(itemsizes) * elements)

    if planner == "optimal":
        groups = optimal_dense(sizes, seconds, price, breaks=breaks).groups
    elif planner == "spd":
        groups = _broken(greedy_mgwfbp(sizes, seconds, price).groups, breaks)
    else:
        limits = {"layer": 0.0, "one": math.inf}
        limit = limits[planner] if planner in limits else float(planner[len("fixed:") : -len("MB")]) * 2**20
        groups = fuse([itemsize * size for itemsize, size in zip(itemsizes, sizes)], limit, breaks)
    return tuple(tuple(order[n] for n in group) for group in groups)


def _broken(groups: Sequence[Sequence[int]], breaks: Sequence[int]) -> list[list[int]]:
    made: list[list[int]] = []
    for group in groups:
        for n, i in enumerate(group):
            if n == 0 or i in breaks:
                made.append([])
            made[-1].append(i)
    return made


def end_seconds(
    a: Buckets, g: Buckets, layers: Sequence[FactorLayer], world: int, costs: Costs, times: LayerTimes
) -> float:
    """Return when the last message of a pass has arrived: A, G and gradients, first come, first served on one link."""
    ready_a = dict(zip(times.a_order, accumulate(times.a_steps[i] for i in times.a_order)))
    forward = sum(times.a_steps)
    ready_g = dict(zip(times.g_order, accumulate(times.g_steps[i] for i in times.g_order)))

    def size(i: int, side: int) -> int:
        return layers[i].packed(side) * layers[i].itemsize

    leaving = [(max(ready_a[i] for i in group), sum(size(i, 0) for i in group)) for group in a]
    leaving += [(forward + max(ready_g[i] for i in group), sum(size(i, 1) for i in group)) for group in g]
    filled = 0
    for i in times.g_order:
        filled += layers[i].d_a * layers[i].d_g * layers[i].itemsize
        if filled >= GRADIENT_BYTES or i == times.g_order[-1]:
            leaving.append((forward + ready_g[i], filled))
            filled = 0
    link = Line()
    for ready, message in sorted(leaving):
        link.carry(ready, costs.seconds("AllReduce", WORLD, world, message))
    return link.free_at
