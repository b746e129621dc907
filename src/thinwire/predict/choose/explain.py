"""The buckets of a method's plan: which tensors share a message, when it is ready, what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.core.kernels.select import keep_count
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Topology
from thinwire.core.program.trace import steady_step, trace
from thinwire.predict.timeline.programs import DTYPES, Place
from thinwire.predict.timeline.simulate import plan_of


@dataclass(frozen=True)
class ExplainedBucket:
    """One bucket of one phase.

    Attributes:
        phase: phase of the method; ACP alternates between two.
        bucket: index in the plan.
        dense: not handled by the method.
        names: of the tensors, in order of arrival.
        ready_seconds: when the last gradient is ready, from the start of backward.
        exchange_seconds: time of its exchanges, without waiting.
        kept: elements that a sparse method sends; None for others.
    """

    phase: int
    bucket: int
    dense: bool
    names: tuple[str, ...]
    elements: int
    ready_seconds: float
    sent_bytes: int
    exchange_seconds: float
    kept: int | None

    @property
    def density(self) -> float | None:
        """Fraction of the elements that is kept."""
        return None if self.kept is None or not self.elements else self.kept / self.elements


def explain(
    method: Method, model_profile: ModelProfile, topology: Topology, costs: Costs, *, backend: str = "gloo"
) -> tuple[ExplainedBucket, ...]:
    """Return the buckets of the plan that ``attach`` makes, phase by phase, in launch order."""
    tensor_of = {tensor.name: tensor for tensor in model_profile.tensors}
    place, dtype = Place(topology), DTYPES[model_profile.dtype_bytes]
    arrival, clock = {}, 0.0
    for tensor in model_profile.tensors:
        clock += tensor.backward_seconds
        arrival[tensor.name] = clock
    density = method.options().get("density")
    groups = []
    for phase, buckets in enumerate(plan_of(method, model_profile, backend, topology, costs).phases):
        for index, bucket in enumerate(buckets):
            shapes = [(name, tensor_of[name].shape) for name in bucket.names]
            elements = sum(math.prod(shape) for _, shape in shapes)
            step = steady_step(method, phase)
            program = SSGD() if bucket.dense else bucket.applied(method)
            traced = trace(program, shapes, topology, rank=place.rank, step=step, dtype=dtype, kept=bucket.kept)
            hops = [s for s in traced if s.scope]
            sparse = density is not None and not bucket.dense and elements
            groups.append(
                ExplainedBucket(
                    phase,
                    index,
                    bucket.dense,
                    bucket.names,
                    elements,
                    max(arrival[name] for name in bucket.names),
                    sum(hop.sent_bytes for hop in hops),
                    sum(
                        costs.seconds(h.kind, h.scope, place.members[h.scope], h.message_bytes) for h in hops if h.scope
                    ),
                    bucket.kept or (keep_count(elements, density) if sparse and density is not None else None),
                )
            )
    return tuple(groups)
