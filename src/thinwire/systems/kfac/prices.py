"""The cost of the parts of a K-FAC step, in seconds, from the planner's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.kernels.symmetric import packed_size
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import WORLD
from thinwire.systems.kfac.plan import KFACPlan

INVERSE, EIGEN = "inverse", "eigen"
"""Curves of ``Costs.compute``: seconds of one inversion or eigendecomposition, by the side of the matrix."""


def curve_name(method: str) -> str:
    """Return which of the two curves a method needs."""
    return EIGEN if method == "eigen" else INVERSE


def inversion_seconds(costs: Costs, method: str, d: int) -> float:
    """Return seconds for one factor as measured by ``thinwire kfac calibrate``; else d^3 FLOPs ("eigen": 10 d^3)."""
    name = curve_name(method)
    if name in costs.compute:
        return costs.compute_seconds(name, d)
    return 2e-5 + costs.compute_seconds("multiply", d**3 * (10 if name == EIGEN else 1))


def message_elements(method: str, d: int) -> int:
    """Return the elements sent for one inverse, including its level."""
    return (d * d + d if method == "eigen" else packed_size(d)) + 1


@dataclass(frozen=True)
class InversionCost:
    """Seconds of an inverse update: computing on the busiest rank, and then sending."""

    compute_seconds: float
    send_seconds: float

    @property
    def total(self) -> float:
        return self.compute_seconds + self.send_seconds


def send_seconds(costs: Costs, plan: KFACPlan, group: int = 0) -> float:
    """Return the seconds to send all inverses of one group of ranks, one message after another."""
    total = 0.0
    for message in plan.messages(group):
        itemsize = plan.layers[message.items[0] // 2].itemsize
        if message.owner is None:
            sent = max(_loads(plan, message.items, [plan.elements(i) for i in message.items]).values())
            total += costs.seconds("AllGather", WORLD, plan.workers, itemsize * sent)
        else:
            size = sum(plan.elements(i) for i in message.items)
            total += costs.seconds("Broadcast", WORLD, plan.workers, itemsize * size)
    return total


def inversion_cost(costs: Costs, plan: KFACPlan) -> InversionCost:
    """Return the inversion cost of a plan; the slowest group counts."""
    seconds = [inversion_seconds(costs, plan.method, plan.dim(i)) for i in range(len(plan.owners))]
    everywhere = sum(s for s, owner in zip(seconds, plan.owners) if owner < 0)
    owned = [i for i, owner in enumerate(plan.owners) if owner >= 0]
    busiest = max(_loads(plan, owned, [seconds[i] for i in owned]).values(), default=0.0)
    groups = plan.world_size // plan.workers
    return InversionCost(everywhere + busiest, max(send_seconds(costs, plan, g) for g in range(groups)))


def _loads(plan: KFACPlan, items: Sequence[int], amounts: Sequence[float]) -> dict[int, float]:
    loads: dict[int, float] = {}
    for item, amount in zip(items, amounts):
        loads[plan.owners[item]] = loads.get(plan.owners[item], 0.0) + amount
    return loads
