"""Local steps without a period: choose the one that reaches a loss soonest, on this model and network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.periods import best_period, up_to
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Topology
from thinwire.predict.choose.worth import WorthOf, period_worth, shipped
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.bottleneck import network_free
from thinwire.predict.timeline.local_steps import Periodic


def resolved(
    method: Method,
    model_profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    *,
    worth: WorthOf | None = None,
    **where: Any,
) -> Method:
    """Return the method, with period and delay chosen if it is local steps without; ``where``: as in ``simulate``."""
    if not isinstance(method, Periodic) or (method.every is not None and method.delay != "auto"):
        return method
    step = model_profile.forward_seconds + sum(model_profile.backward_seconds)
    waited = replace(method, every=1, delay=0)

    def round_seconds(prices: Costs) -> float:
        return simulate(waited, model_profile, topology, prices, **where).step_seconds - step

    round_, compute = round_seconds(costs), 0.0
    if where.get("shared_compute", True):
        compute = round_seconds(replace(costs, exchanges=network_free(costs, startup=0, rest=0).exchanges))
    steps = period_worth(worth or shipped(), method.codec, model_profile.elements, topology.world_size)
    periods = up_to(method.most) if method.every is None else (method.every,)
    every, delay = best_period(step, round_, steps, delay=method.delay, periods=periods, compute_seconds=compute)
    return replace(method, every=every, delay=delay)
