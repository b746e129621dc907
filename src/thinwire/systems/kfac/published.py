"""Published schedules of K-FAC, each a maker of plans, for ``Variant(plan=)``; by name for ``Variant(schedule=)``.

Sources: D-KFAC and SPD-KFAC, Shi, Zhang and Li 2021 (arXiv 2107.06533; the exact rules are those of the authors' code,
shyhuai/kfac_pytorch); MPD-KFAC, Osawa et al. 2019, Pauloski et al. 2020; KAISA, Pauloski et al. 2021 (arXiv
2107.01739); DP-KFAC, Zhang, Shi et al. 2022 (arXiv 2206.15143).

Differences from the papers: the decomposition's eigenvalues are sent instead of a d_G x d_A table, so A and G need not
have the same owner; DP-KFAC is KAISA with one worker per layer, whose owner uses its own batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.merge import Price, greedy_mgwfbp
from thinwire.core.pricing.placement import place, place_threshold
from thinwire.systems.kfac.assignment import Groups, PlanMaker, by_cost, cheapest, fused, up_to
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.prices import LayerTimes


def dkfac(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """D-KFAC, the plainest: statistics in one message after backward, every rank inverts everything."""
    return plan


def mpd(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """MPD-KFAC: the same messages; ranks invert layers in turn."""
    owners = tuple(i % plan.world_size for i in range(len(plan.layers)) for _ in range(2))
    return replace(plan, schedule="mpd", owners=owners)


def spd(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """SPD-KFAC: fused as MG-WFBP fuses gradients; factors of sides from 1400 on have owners, balanced by the side."""
    if plan.world_size > 1:
        plan = fused(plan, (_mgwfbp,), costs, times)
    owners = place_threshold([plan.dim(i) for i in range(len(plan.owners))], plan.world_size).owner
    return replace(plan, schedule="spd-published", overlap=True, owners=owners)


def kaisa(fraction: str) -> PlanMaker:
    """KAISA: 25 MB a message during the passes; a fraction ("1/2", "0.5") of the ranks preconditions each layer."""

    def maker(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
        above, _, below = fraction.partition("/")
        world, workers = plan.world_size, plan.world_size * float(above) / float(below or 1)
        if workers < 1 or abs(workers - round(workers)) > 1e-6 or world % round(workers):
            valid = ", ".join([f"kaisa:{w}/{world}" for w in range(1, world) if world % w == 0] + ["kaisa:1"])
            raise ValueError(
                f"schedule='kaisa:{fraction}' does not divide {world} ranks into equal groups; use {valid}"
            )
        if world > 1:
            plan = fused(plan, (up_to(25 * 2**20),), costs, times)
        plan = replace(plan, schedule=f"kaisa:{fraction}", overlap=True, workers=round(workers))
        plan = replace(plan, owners=_in_groups(plan))
        return plan if plan.workers == 1 else cheapest([plan], costs)

    return maker


def dp(plan: KFACPlan, costs: Costs, times: LayerTimes) -> KFACPlan:
    """DP-KFAC, another algorithm: factors are not averaged; a layer's owner inverts, and preconditions for all."""
    plan = replace(plan, schedule="dp", a_buckets=(), g_buckets=(), exchange=False, workers=1)
    return replace(plan, owners=_in_groups(plan))


MAKERS: dict[str, PlanMaker] = {"spd": by_cost, "spd-published": spd, "dkfac": dkfac, "mpd": mpd, "dp": dp}


def named(schedule: str) -> PlanMaker:
    """Return the maker of a schedule's plans."""
    if schedule in MAKERS:
        return MAKERS[schedule]
    if found := re.fullmatch(r"kaisa:(1(\.0*)?|0?\.\d+|1/[1-9]\d*)", str(schedule)):
        return kaisa(found[1])
    raise ValueError(f"schedule={schedule!r} is unknown; use one of {', '.join(MAKERS)}, kaisa:<fraction>")


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


def _mgwfbp(sizes: Sequence[int], seconds: Sequence[float], price: Price, itemsizes: Sequence[int]) -> Groups:
    groups = greedy_mgwfbp(sizes, seconds, price).groups
    return [list(run) for group in groups for _, run in groupby(group, key=lambda n: itemsizes[n])]
