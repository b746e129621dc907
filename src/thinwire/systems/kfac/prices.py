"""What the parts of a K-FAC step cost, in seconds: inversions and their messages, and when factors are ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile, kronecker_shapes
from thinwire.core.program import WORLD
from thinwire.systems.kfac.plan import FactorLayer, KFACPlan


def curve_name(method: str) -> str:
    """Name the curve of ``Costs.compute`` that a method needs: seconds by the side of the matrix."""
    return "eigen" if method == "eigen" else "inverse"


def inversion_seconds(costs: Costs, method: str, d: int) -> float:
    """Return seconds for one factor as measured by ``thinwire kfac calibrate``; else d^3 FLOPs ("eigen": 10 d^3)."""
    name = curve_name(method)
    if name in costs.compute:
        return costs.compute_seconds(name, d)
    return 2e-5 + costs.compute_seconds("multiply", d**3 * (10 if name == "eigen" else 1))


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


def inversion_cost(costs: Costs, plan: KFACPlan) -> tuple[float, float]:
    """Return the seconds of inverting and of sending; the slowest group counts."""
    seconds = [inversion_seconds(costs, plan.method, plan.dim(i)) for i in range(len(plan.owners))]
    everywhere = sum(s for s, owner in zip(seconds, plan.owners) if owner < 0)
    owned = [i for i, owner in enumerate(plan.owners) if owner >= 0]
    busiest = max(_loads(plan, owned, [seconds[i] for i in owned]).values(), default=0.0)
    groups = plan.world_size // plan.workers
    return everywhere + busiest, max(send_seconds(costs, plan, g) for g in range(groups))


def _loads(plan: KFACPlan, items: Sequence[int], amounts: Sequence[float]) -> dict[int, float]:
    loads: dict[int, float] = {}
    for item, amount in zip(items, amounts):
        loads[plan.owners[item]] = loads.get(plan.owners[item], 0.0) + amount
    return loads


@dataclass(frozen=True)
class LayerTimes:
    """Seconds, one entry per layer, in the order of the layers."""

    a_steps: tuple[float, ...]  # from the previous A being ready to this one: the work between, and this factor
    g_steps: tuple[float, ...]  # the same for G, in backward order
    a_factor: tuple[float, ...]  # the share of these for computing the factor itself
    g_factor: tuple[float, ...]
    a_order: tuple[int, ...]  # the layers in the order in which their A becomes ready
    g_order: tuple[int, ...]

    @classmethod
    def unknown(cls, layers: int) -> LayerTimes:
        """Return times in which everything is ready at once, in the order of the layers."""
        nothing, order = (0.0,) * layers, tuple(range(layers))
        return cls(nothing, nothing, nothing, nothing, order, order[::-1])

    @classmethod
    def of_profile(cls, profile: ModelProfile, layers: Sequence[FactorLayer]) -> LayerTimes:
        """Return the times from a profile. A factor takes d_A/d_G, or d_G/d_A, of its layer's time: rows times rows."""
        forward = {module.name: module.forward_seconds for module in profile.modules}
        own = [forward.get(layer.name, 0.0) for layer in layers]
        a_factor = tuple(t * layer.d_a / layer.d_g for t, layer in zip(own, layers))
        g_factor = tuple(t * layer.d_g / layer.d_a for t, layer in zip(own, layers))

        def ready(
            work: Iterable[tuple[str, float]], factor: Sequence[float]
        ) -> tuple[tuple[float, ...], tuple[int, ...]]:
            """A factor is ready before its layer's own work, which begins with the first entry of that name."""
            place = {layer.name: i for i, layer in enumerate(layers)}
            steps, order, waiting = [0.0] * len(layers), [], 0.0
            for name, seconds in work:
                if name in place:
                    order.append(place.pop(name))
                    steps[order[-1]], waiting = waiting + factor[order[-1]], 0.0
                waiting += seconds
            return tuple(steps), (*order, *place.values())

        a_steps, a_order = ready([(x.name, x.forward_seconds) for x in profile.modules], a_factor)
        g_steps, g_order = ready([(x.module, x.backward_seconds) for x in profile.tensors], g_factor)
        return cls(a_steps, g_steps, a_factor, g_factor, a_order, g_order)


def layers_of(profile: ModelProfile, *, max_dim: int = 8192) -> tuple[FactorLayer, ...]:
    """Return the layers of a profile that K-FAC can precondition, in order of registration."""
    shapes = kronecker_shapes(profile)
    return tuple(FactorLayer(name, d_a, d_g) for name, d_a, d_g in shapes if max(d_a, d_g) <= max_dim)
