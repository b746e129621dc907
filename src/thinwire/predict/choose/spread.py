"""The uncertainty of a prediction, and how much of it rests on measurements made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.curves import Provenance
from thinwire.core.pricing.formulas import KINDS
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Scope, Topology
from thinwire.predict.timeline.programs import Place
from thinwire.predict.timeline.result import COMPUTE, EXCHANGE_CPU, METHOD, Event, Timeline, union_seconds

UNCERTAINTY: Mapping[Provenance, float] = {"measured here": 0.10, "measured elsewhere": 0.25, "assumed": 0.40}
"""Relative error of a price, by its provenance: rules of thumb, not confidence intervals."""


def spread_costs(costs: Costs, topology: Topology, sign: int) -> Costs:
    """Return all prices at one end of their uncertainty: -1 cheap, 1 expensive.

    Curves are looked up first, so that curves scaled from another group size count as assumed.
    """
    exchanges = {}
    for scope, members in Place(topology).members.items():
        for kind in KINDS if members > 1 else ():
            curve = costs.lookup(kind, scope, members)
            factor = 1 + sign * UNCERTAINTY[curve.provenance]
            exchanges[kind, scope.value, members] = curve.stretched(factor, factor, "end of a band")
    compute = {}
    for name, curve in costs.compute.items():
        factor = 1 + sign * UNCERTAINTY[curve.provenance]
        compute[name] = curve.stretched(factor, factor, "end of a band")
    shares = {}
    for kind, line in costs.cpu_share.items():
        factor = 1 + sign * UNCERTAINTY[line.provenance]
        shares[kind] = line.stretched(factor, factor, "end of a band")
    return replace(costs, exchanges=exchanges, compute=compute, cpu_share=shares)


def spread_profile(profile: ModelProfile, sign: int) -> ModelProfile:
    """Return the model's compute at one end of its uncertainty."""
    return profile.scaled(1 + sign * UNCERTAINTY[profile.provenance])


def measured_share(timeline: Timeline, profile: ModelProfile, topology: Topology, costs: Costs) -> float:
    """Return the fraction of the step whose price was measured here.

    Each moment counts once: for forward and backward if they run, otherwise for the methods' own work, otherwise for
    the exchange in flight. Method work counts as measured if every compute curve was measured.
    """
    members = Place(topology).members
    method = bool(costs.compute) and all(c.provenance == "measured here" for c in costs.compute.values())
    taken = all(line.provenance == "measured here" for line in costs.cpu_share.values())

    def measured(event: Event) -> bool:
        if event.lane == COMPUTE:
            return profile.provenance == "measured here"
        if event.lane == METHOD:
            return taken if event.name == EXCHANGE_CPU else method
        scope = Scope(event.lane.removeprefix("link "))
        return costs.lookup(event.name, scope, members[scope]).provenance == "measured here"

    ranks: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for event in timeline.events:
        place = {COMPUTE: 0, METHOD: 1}.get(event.lane, 2)
        ranks.setdefault((place, measured(event)), []).append((event.start_seconds, event.end_seconds))
    covered: list[tuple[float, float]] = []
    share = before = 0.0
    for (_, counts), intervals in sorted(ranks.items()):  # unmeasured ones first
        covered += intervals
        after = union_seconds(covered)
        share += (after - before) if counts else 0.0
        before = after
    return share / before if before else 0.0
