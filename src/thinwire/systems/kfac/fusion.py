"""Which factors share a message: the exact optimum, the published rule, plain limits.

A is sent in the order of forward, G in that of backward. The published rule, and the optimum for one direction alone,
assume that the link is free. It is not: gradients are sent during backward too, and A may still be on the link when G
is ready. So "optimal" computes the time of the optimum of each direction, and of the plain fusions, together with the
gradients on one link, and takes the one that ends first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.merge import fuse, greedy_mgwfbp
from thinwire.core.pricing.optimal import optimal_dense
from thinwire.core.program import WORLD
from thinwire.systems.kfac.plan import FactorLayer
from thinwire.systems.kfac.times import LayerTimes

Buckets = tuple[tuple[int, ...], ...]
_GRADIENT_BYTES = 4 << 20  # of one message of gradients


def fused(
    planner: str, layers: Sequence[FactorLayer], world: int, costs: Costs, times: LayerTimes
) -> tuple[Buckets, Buckets]:
    """Return the messages of A and of G, as indices of layers.

    Args:
        planner: "optimal", "spd" (the published rule), "layer", "one" or "fixed:<MiB>MB".
        layers: all layers.
        world: number of ranks.
        costs: with that of an "AllReduce" in the world.
        times: when factors are ready.
    """
    if planner != "optimal":
        a, g = (one_direction(planner, layers, side, world, costs, times) for side in (0, 1))
        return a, g
    rules = ("optimal", "one", "fixed:25MB", "layer")
    of_a, of_g = ([one_direction(rule, layers, side, world, costs, times) for rule in rules] for side in (0, 1))
    return min(
        ((x, y) for x in of_a for y in of_g),
        key=lambda pair: end_seconds(pair[0], pair[1], layers, world, costs, times),
    )


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
    elif planner == "layer":
        groups = [[n] for n in range(len(order))]
    elif planner == "one":
        groups = _broken([list(range(len(order)))], breaks)
    else:
        limit = float(planner.removeprefix("fixed:").removesuffix("MB")) * 2**20
        groups = fuse([itemsize * size for itemsize, size in zip(itemsizes, sizes)], limit, breaks)
    return tuple(tuple(order[n] for n in group) for group in groups)


def _broken(groups: Sequence[Sequence[int]], breaks: Sequence[int]) -> list[list[int]]:
    """Split groups wherever a new one must begin."""
    made: list[list[int]] = []
    for group in groups:
        for place, i in enumerate(group):
            if place == 0 or i in breaks:
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
    leaving = [(max(ready_a[i] for i in group), sum(_bytes(layers[i], 0) for i in group)) for group in a]
    leaving += [(forward + max(ready_g[i] for i in group), sum(_bytes(layers[i], 1) for i in group)) for group in g]
    size = 0
    for i in times.g_order:
        size += layers[i].d_a * layers[i].d_g * layers[i].itemsize
        if size >= _GRADIENT_BYTES or i == times.g_order[-1]:
            leaving.append((forward + ready_g[i], size))
            size = 0
    free = 0.0
    for ready, message in sorted(leaving):
        free = max(free, ready) + costs.seconds("AllReduce", WORLD, world, message)
    return free


def _bytes(layer: FactorLayer, side: int) -> int:
    return layer.packed(side) * layer.itemsize
