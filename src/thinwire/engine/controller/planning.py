"""Make plans: from sizes, from the first step's order, and from what plans would take by measured times.

Prices are computed on rank 0, and the other ranks follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.core.methods.registry import lossy_candidates
from thinwire.core.methods.registry import method as named
from thinwire.core.pricing import plans
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import Measured, follows_network, gain_of_overlap, needs_measurement
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Plan, Topology
from thinwire.core.program.trace import TracedExchange, trace
from thinwire.engine.local.settings import local_settings
from thinwire.engine.parameters import ManagedParameter, gradient_dtype
from thinwire.engine.ranks.communicator import Communicator
from thinwire.predict.choose.rank import SimulatedMethod, judge, without_startups
from thinwire.predict.choose.worth import EXACT, WorthOf, resolved, shipped
from thinwire.predict.timeline import Timeline, simulate

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
_ONE_BUCKET_BYTES = 1 << 20  # not worth splitting


def make_plan(
    method: Method,
    managed: Sequence[ManagedParameter],
    order: Sequence[int],
    late: Iterable[int],
    backend: str,
    measured: Measured | None = None,
    all_reduce: Callable[[float], float] | None = None,
) -> Plan:
    """Fuse parameters into buckets; see :func:`thinwire.core.pricing.plans.make_plan`."""
    tensors = [
        plans.PlanTensor(m.name, m.shape, m.dense, str(dtype), dtype.itemsize)
        for m in managed
        for dtype in [gradient_dtype(m.parameter)]
    ]
    return plans.make_plan(method, tensors, order, late, backend, measured, all_reduce)


def measured_plan(method: Method, managed: Sequence[ManagedParameter], backend: str, measured: Measured) -> Plan:
    index = {m.name: m.index for m in managed}
    order = [index[tensor.name] for tensor in measured.profile.tensors]
    return make_plan(method, managed, order, (), backend, measured)


def price_plan(
    method: Method,
    managed: Sequence[ManagedParameter],
    backend: str,
    measured: Measured,
    dense: Method | None,
    optimizer_seconds: float,
) -> Timeline:
    return simulate(
        method,
        measured.profile,
        measured.topology,
        measured.costs,
        plan=measured_plan(method, managed, backend, measured),
        backend=backend,
        dense=dense,
        shared_compute=not measured.side_stream,
        optimizer_seconds=optimizer_seconds,
    )


def trace_plan(
    plan: Plan, method: Method, dense: Method, managed: Sequence[ManagedParameter], topology: Topology, rank: int
) -> list[list[list[TracedExchange]]]:
    """Return the collectives of every bucket of every phase, found by running the programs on shapes alone."""
    by_name = {m.name: m for m in managed}
    result = []
    for phase, buckets in enumerate(plan.phases):
        traced = []
        for bucket in buckets:
            entries = [by_name[name] for name in bucket.names]
            dtype, shapes = gradient_dtype(entries[0].parameter), [(m.name, m.shape) for m in entries]
            runs = bucket.applied(dense if bucket.dense else method)
            traced.append(trace(runs, shapes, topology, rank=rank, step=phase, dtype=dtype, kept=bucket.kept))
        result.append(traced)
    return result


def rebuild(
    method: Method,
    managed: Sequence[ManagedParameter],
    communicator: Communicator,
    order: Sequence[int],
    unseen: Sequence[int],
    backward_seconds: float,
    *,
    measured: bool,
) -> Plan:
    """Make the plan from the first step by rank 0's values, on all ranks. ``measured``: another plan follows anyway."""
    rows = [order, [int(i in unseen) for i in order]]
    agreed = torch.tensor(rows, dtype=torch.int64, device=communicator.device)
    lasted = torch.tensor(backward_seconds, dtype=torch.float64, device=communicator.device)
    communicator.broadcast([agreed, lasted])
    order, flags = agreed.tolist()
    late = [i for i, flag in zip(order, flags) if flag]
    rate = None
    large = sum(m.parameter.nbytes for m in managed) > _ONE_BUCKET_BYTES
    plain = large and not measured and follows_network(method, communicator.backend)
    if plain and (seen := communicator.typical_exchange()) is not None:
        sent, seconds = seen
        rate = gain_of_overlap(lambda size: seconds / sent * size, lasted.item())
    return make_plan(method, managed, order, late, communicator.backend, all_reduce=rate)


@dataclass(frozen=True)
class AgreedTimes:
    """The times that the ranks agree on: for each, the slowest rank's."""

    profile: ModelProfile  # forward up to the first gradient, then from gradient to gradient
    outside_seconds: float  # from the end of backward to the next forward: optimizer, data
    step_seconds: float  # from forward to forward


@dataclass(frozen=True)
class _Offer(SimulatedMethod):
    options: dict[str, Any]


@dataclass(frozen=True)
class PlanPrices:
    """Prices plans for one measurement."""

    backend: str
    topology: Topology
    manage: Callable[[Method], list[ManagedParameter]]
    dense: Method
    costs: Costs
    measurement: AgreedTimes
    side_stream: bool  # methods compute alongside backward, on a core or a stream of their own
    worth: WorthOf | None  # what a step of lossy methods is worth; None: only exact ones are priced

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
        """Return what ``judge`` recommends of exact plans; with ``worth``, of lossy methods too.

        "auto" never takes local steps itself, but says where they would be recommended.
        """
        lossy = self.worth is not None
        exact = (*EXACT_PLANS, *(HIERARCHICAL if self.topology.two_levels else ()))
        offers = [self._offer(*candidate) for candidate in (*exact, *(lossy_candidates() if lossy else ()))]
        alone = without_startups(self.measurement.profile, self.topology, self.costs, self._where)
        chosen = judge(offers, self.topology, alone, lossy=lossy).best
        assert isinstance(chosen, _Offer)
        words = "".join(f", {key}={value}" for key, value in chosen.options.items())
        allowed = "allowed" if lossy else "not asked for (lossy=True)"
        steps = "" if chosen.exact else f" x {chosen.worth.middle:.2f} steps ({chosen.worth.source})"
        plan, name = chosen.timeline.plan, chosen.label
        buckets = f"{len(plan.phases[0])} buckets"
        why = [
            f"auto: {name}{words}: {buckets}, {chosen.seconds:.4g} s predicted{steps}",
            f"auto: plain ssgd: {offers[0].seconds:.4g} s; {len(offers)} plans priced on measured "
            f"times and network; lossy methods were {allowed}",
        ]
        local = self._local()
        if local is not None and judge([*offers, local], self.topology, alone, lossy=True).best is local:
            why.append(
                f'auto: attach(model, optimizer, "local") would be faster: {local.seconds:.4g} s a step x '
                f"{local.worth.middle:.2f} steps, exchanging every {local.timeline.every}, "
                f"against {chosen.seconds:.4g} s x {chosen.worth.middle:.2f} for {name}"
            )
        found = {"method": name, "options": chosen.options, "plan": plan.to_json()}
        return {**found, "seconds": chosen.seconds, "why": why}

    def _local(self) -> SimulatedMethod | None:
        """Return ``"local"`` as it comes, without a codec where none was timed; None if that cannot be priced here."""
        worth = self.worth or shipped()
        profile, where = self.measurement.profile, {**self._where}
        outside = where.pop("optimizer_seconds")
        try:
            asked = local_settings("local", {} if self.worth else {"codec": "none"}).priced()
            method = resolved(asked, profile, self.topology, self.costs, worth=worth, **where)
            timeline = simulate(method, profile, self.topology, self.costs, optimizer_seconds=outside, **where)
        except (LookupError, ValueError):
            return None
        return SimulatedMethod("local", method, timeline, worth(method, profile.elements, self.topology.world_size))

    @property
    def _where(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "shared_compute": not self.side_stream,
            "optimizer_seconds": self.measurement.outside_seconds,
        }

    def _offer(self, name: str, options: dict[str, Any]) -> _Offer:
        method = named(name, **options)
        elements, workers = self.measurement.profile.elements, self.topology.world_size
        worth = EXACT if self.worth is None else self.worth(method, elements, workers)
        return _Offer(name, method, self._price(method), worth, options)

    def fused(self, method: Method, limit: Any) -> Plan:
        other = replace(method, fusion=limit)  # type: ignore[type-var]
        return measured_plan(other, self.manage(method), self.backend, self._measured)

    @property
    def _measured(self) -> Measured:
        return Measured(self.measurement.profile, self.costs, self.topology, self.side_stream)

    def _price(self, method: Method) -> Timeline:
        outside = self.measurement.outside_seconds
        return price_plan(method, self.manage(method), self.backend, self._measured, self.dense, outside)
