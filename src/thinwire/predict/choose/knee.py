"""The number of workers from which on a method no longer scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Topology
from thinwire.predict.choose.resolved import resolved
from thinwire.predict.choose.worth import WorthOf
from thinwire.predict.timeline import simulate

Prices: TypeAlias = Costs | Callable[[Topology], Costs]
"""Costs, scaled by the formulas to other numbers of ranks, or a function that returns them."""


def knee(
    method: Method,
    model_profile: ModelProfile,
    costs: Prices,
    *,
    ranks_per_node: int = 1,
    backend: str = "gloo",
    shared_compute: bool = True,
    efficiency: float = 0.8,
    most: int = 4096,
    worth: WorthOf | None = None,
) -> int | None:
    """Find the smallest number of workers whose efficiency lies below a limit.

    Efficiency is t(1) / t(P): forward and backward alone over the predicted step, with the same batch per rank.
    Machines are whole: the answer is a multiple of ``ranks_per_node``. It is found by doubling, then bisection, which
    assumes that efficiency falls with P.

    Args:
        method: simulated at each number of workers, with its default buckets.
        model_profile: of the model.
        costs: costs of exchanges and compute, or a function of the topology.
        ranks_per_node: ranks of each machine.
        backend: see ``simulate``.
        shared_compute: see ``simulate``.
        efficiency: the limit, in (0, 1].
        most: largest number of workers to try.
        worth: see ``choose``; used to find a period for local steps without one.

    Returns:
        The number; None if efficiency stays above the limit up to ``most``.

    Raises:
        ValueError: a number out of range.
        LookupError: a price is missing.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be in (0, 1], not {efficiency}")
    if ranks_per_node < 1 or most < ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node} must be from 1 to most={most}")
    alone = model_profile.forward_seconds + sum(model_profile.backward_seconds)

    def bends(nodes: int) -> bool:
        workers = nodes * ranks_per_node
        if workers == 1:
            return False
        topology = Topology(workers, ranks_per_node)
        priced = costs if isinstance(costs, Costs) else costs(topology)
        where: dict[str, Any] = {"backend": backend, "shared_compute": shared_compute}
        ran = resolved(method, model_profile, topology, priced, worth=worth, **where)
        step = simulate(ran, model_profile, topology, priced, **where).step_seconds
        return alone < efficiency * step

    last = most // ranks_per_node
    good, bad = 0, 1
    while not bends(bad):
        if bad == last:
            return None
        good, bad = bad, min(2 * bad, last)
    while bad - good > 1:
        middle = (good + bad) // 2
        if bends(middle):
            bad = middle
        else:
            good = middle
    return bad * ranks_per_node
