"""Predict what a measured step would take under different plans; runs on rank 0, and the other ranks follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thinwire.core.methods.registry import lossy_candidates
from thinwire.core.methods.registry import method as named
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import Measured, needs_measurement
from thinwire.core.program import Method, Plan, Topology
from thinwire.engine.controller.local_steps import sooner_apart
from thinwire.engine.controller.planning import measured_plan, price_plan
from thinwire.engine.controller.timings import AgreedTimes
from thinwire.engine.parameters import Managed
from thinwire.predict.choose.rank import LOSSY_GAIN, SimulatedMethod, as_soon, simplest
from thinwire.predict.choose.worth import EXACT, WorthOf
from thinwire.predict.timeline import Timeline

Named = tuple[str, dict[str, Any]]
EXACT_PLANS: tuple[Named, ...] = (
    ("ssgd", {}),
    ("ssgd", {"fusion": "optimal"}),
    ("ssgd", {"fusion": 1}),
    ("ssgd", {"fusion": 25}),
    ("ssgd", {"fusion": "single"}),
)
HIERARCHICAL: tuple[Named, ...] = (
    ("ssgd", {"collective": "auto"}),
    ("ssgd", {"collective": "auto", "fusion": "optimal"}),
)
_GAIN = 0.03  # another exact plan must be faster by this share to be taken


@dataclass(frozen=True)
class _Offer(SimulatedMethod):
    options: dict[str, Any]


@dataclass(frozen=True)
class PlanPrices:
    """Prices plans for one measurement.

    Attributes:
        backend: "gloo" or "nccl".
        topology: of the ranks.
        manage: returns the managed parameters under a method.
        dense: the method of dense buckets.
        costs: of the network and of compute.
        measurement: the measured step.
        side_stream: whether methods compute alongside backward, on a core or a stream of their own.
        worth: what a step of lossy methods is worth; None: only exact ones are priced.
    """

    backend: str
    topology: Topology
    manage: Callable[[Method], list[Managed]]
    dense: Method
    costs: Costs
    measurement: AgreedTimes
    side_stream: bool
    worth: WorthOf | None

    def planned(self, method: Method) -> dict[str, Any]:
        """Return the measured plan of a method; "auto" becomes "optimal"."""
        rule = method
        if method.fusion == "auto" and not needs_measurement(method):
            rule = replace(method, fusion="optimal")  # type: ignore[type-var]
        timeline = self._price(rule)
        plan, seconds = timeline.plan, timeline.step_seconds
        why = f"{method.name}: {len(plan.phases[0])} buckets from measured times, {seconds:.4g} s a step predicted"
        return {"method": "", "options": {}, "plan": plan.to_json(), "seconds": seconds, "why": [why]}

    def best(self) -> dict[str, Any]:
        """Return the fastest exact plan; with ``worth``, what is soonest at a loss, by ``planner.choose``'s rule."""
        lossy = self.worth is not None
        levels = self.topology.two_levels
        exact = [self._offer(*candidate) for candidate in (*EXACT_PLANS, *(HIERARCHICAL if levels else ()))]
        usual, chosen = exact[0], min(exact, key=lambda offer: offer.seconds)
        if chosen.seconds > (1 - _GAIN) * usual.seconds:
            chosen = usual
        others = [self._offer(*candidate) for candidate in lossy_candidates()] if lossy else []
        limit = (1 - LOSSY_GAIN) * min(offer.seconds for offer in exact)
        sooner = [offer for offer in others if offer.most_loss_seconds < limit]
        if sooner:
            first = min(sooner, key=lambda offer: offer.loss_seconds)
            chosen = simplest(first, [offer for offer in sooner if as_soon(offer, first)])
        words = "".join(f", {key}={value}" for key, value in chosen.options.items())
        allowed = "allowed" if lossy else "not asked for (lossy=True)"
        steps = f" x {chosen.worth.middle:.2f} steps ({chosen.worth.source})" if chosen in sooner else ""
        plan, name = chosen.timeline.plan, chosen.label
        buckets = f"{len(plan.phases[0])} buckets"
        why = [
            f"auto: {name}{words}: {buckets}, {chosen.seconds:.4g} s predicted{steps}",
            f"auto: plain ssgd: {usual.seconds:.4g} s; {len(exact) + len(others)} plans priced on measured "
            f"times and network; lossy methods were {allowed}",
        ]
        if self.worth is not None:
            why += sooner_apart(
                self._measured, self.backend, self.measurement.outside_seconds, self.worth,
                taken=name, seconds=chosen.seconds, steps=chosen.worth.middle,
            )  # fmt: skip
        found = {"method": name, "options": chosen.options, "plan": plan.to_json()}
        return {**found, "seconds": chosen.seconds, "why": why}

    def _offer(self, name: str, options: dict[str, Any]) -> _Offer:
        method = named(name, **options)
        elements, workers = self.measurement.profile.elements, self.topology.world_size
        worth = EXACT if self.worth is None else self.worth(method, elements, workers)
        return _Offer(name, method, self._price(method), worth, options)

    def fused(self, method: Method, limit: Any) -> Plan:
        """Return the plan of a method at another fusion limit: MiB, or "auto"."""
        other = replace(method, fusion=limit)  # type: ignore[type-var]
        return measured_plan(other, self.manage(method), self.backend, self._measured)

    @property
    def _measured(self) -> Measured:
        return Measured(self.measurement.profile, self.costs, self.topology, self.side_stream)

    def _price(self, method: Method) -> Timeline:
        outside = self.measurement.outside_seconds
        return price_plan(method, self.manage(method), self.backend, self._measured, self.dense, outside)
