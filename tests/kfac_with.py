"""A KFAC from one flat set of options, of which some are Variant's, or change its plan: tests mix them in tables."""

import dataclasses
from functools import partial

from thinwire.core.pricing.placement import place_threshold
from thinwire.systems.kfac import KFAC, Variant
from thinwire.systems.kfac.assignment import fused, up_to
from thinwire.systems.kfac.published import named

_OF_VARIANT = {field.name for field in dataclasses.fields(Variant)}
_OF_PLAN = {"limit", "threshold", "transport"}


def ruled(plan, costs, times, *, schedule="spd", limit=None, threshold=None, transport=None):
    """A schedule's plan; but messages of up to ``limit`` bytes, owners from a side on, and one transport."""
    plan = named(schedule)(plan, costs, times)
    if limit is not None:
        plan = fused(plan, [up_to(limit)], costs, times)
    if threshold is not None:
        sides = [plan.dim(i) for i in range(len(plan.owners))]
        plan = dataclasses.replace(plan, owners=place_threshold(sides, plan.world_size, threshold).owner)
    return dataclasses.replace(plan, transport=transport or plan.transport)


def kfac_with(net, sync, **options):
    rules = {name: options.pop(name) for name in _OF_PLAN & set(options)}
    if rules:
        options["plan"] = partial(ruled, schedule=options.pop("schedule", "spd"), **rules)
    variant = {name: options.pop(name) for name in _OF_VARIANT & set(options)}
    return KFAC(net, sync, **options, variant=Variant(**variant))
