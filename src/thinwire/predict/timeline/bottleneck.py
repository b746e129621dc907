"""What bounds a step: make each resource free in turn, and find the one that shortens the step most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Plan, Topology
from thinwire.predict.timeline.simulate import plan_of, simulate

Bound: TypeAlias = Literal["compute", "network bandwidth", "network latency", "method compute"]


def bound_by(
    method: Method,
    model_profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    *,
    plan: Plan | None = None,
    backend: str = "gloo",
    dense: Method | None = None,
    shared_compute: bool = True,
    optimizer_seconds: float = 0.0,
    slowdown: float | Sequence[float] = 1.0,
    steps: int = 2,
) -> Bound:
    """Return the resource whose removal shortens the step most; arguments as in ``simulate``, the plan stays the same.

    "compute" is forward, backward and optimizer; "method compute" is the methods' segments. CPU time of the exchanges
    counts as network: its rate as bandwidth, its start-up as latency.
    """
    plan = plan_of(method, model_profile, backend, topology, costs) if plan is None else plan

    def seconds(profile: ModelProfile, priced: Costs, update: float) -> float:
        return simulate(
            method,
            profile,
            topology,
            priced,
            plan=plan,
            backend=backend,
            dense=dense,
            shared_compute=shared_compute,
            optimizer_seconds=update,
            slowdown=slowdown,
            steps=steps,
        ).step_seconds

    free = {name: curve.stretched(0, 0, "free") for name, curve in costs.compute.items()}
    without: dict[Bound, float] = {
        "compute": seconds(model_profile.scaled(0.0), costs, 0.0),
        "network bandwidth": seconds(model_profile, network_free(costs, startup=1, rest=0), optimizer_seconds),
        "network latency": seconds(model_profile, network_free(costs, startup=0, rest=1), optimizer_seconds),
        "method compute": seconds(model_profile, replace(costs, compute=free), optimizer_seconds),
    }
    return min(without, key=lambda name: without[name])


def network_free(costs: Costs, *, startup: int, rest: int) -> Costs:
    """Return the same costs with the network's start-ups or rates made free."""
    return replace(
        costs,
        exchanges={key: curve.stretched(startup, rest, "made free") for key, curve in costs.exchanges.items()},
        cpu_share={kind: line.stretched(startup, rest, "made free") for kind, line in costs.cpu_share.items()},
    )
