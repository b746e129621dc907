"""Make plans for managed parameters by the planner's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thinwire.core.pricing import plans
from thinwire.core.pricing.plans import Measured
from thinwire.core.program import Method, Plan, Topology
from thinwire.core.program.trace import TracedExchange, trace
from thinwire.engine.parameters import Managed, gradient_dtype
from thinwire.predict.timeline import Timeline, simulate

__all__ = ["make_plan", "measured_plan", "price_plan", "trace_plan"]


def make_plan(
    method: Method,
    managed: Sequence[Managed],
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


def measured_plan(method: Method, managed: Sequence[Managed], backend: str, measured: Measured) -> Plan:
    """Return the plan for measured times, in their order of arrival."""
    index = {m.name: m.index for m in managed}
    order = [index[tensor.name] for tensor in measured.profile.tensors]
    return make_plan(method, managed, order, (), backend, measured)


def price_plan(
    method: Method,
    managed: Sequence[Managed],
    backend: str,
    measured: Measured,
    dense: Method | None,
    optimizer_seconds: float,
) -> Timeline:
    """Return the predicted step under the plan for measured times."""
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
    plan: Plan, method: Method, dense: Method, managed: Sequence[Managed], topology: Topology, rank: int
) -> list[list[list[TracedExchange]]]:
    """Return the collectives of every bucket of every phase, found by running the programs on shapes alone."""
    by_name = {m.name: m for m in managed}
    result = []
    for phase, buckets in enumerate(plan.phases):
        traced = []
        for bucket in buckets:
            entries = [by_name[name] for name in bucket.names]
            program = bucket.applied(dense if bucket.dense else method)
            shapes = [(m.name, m.shape) for m in entries]
            traced.append(
                trace(
                    program,
                    shapes,
                    topology,
                    rank=rank,
                    step=phase,
                    dtype=gradient_dtype(entries[0].parameter),
                    kept=bucket.kept,
                )
            )
        result.append(traced)
    return result
