"""Predict what a step of K-FAC will take: laid out as tasks and programs, and run on the simulator's machine.

Three parts follow one another: the passes, with statistics and the exchange of factors and gradients on one link; the
inversions, with the exchange of the inverses; the preconditioning, with the return of the preconditioned gradients. The
busiest rank stands for all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import WORLD
from thinwire.predict.timeline.machine import ComputeTask, Machine
from thinwire.predict.timeline.programs import Hop, ProgramPart
from thinwire.systems.kfac.assignment import GRADIENT_BYTES
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.prices import LayerTimes, inversion_cost


@dataclass(frozen=True)
class KFACPrediction:
    """Seconds of one step by kind of work, and bytes that one rank sends."""

    passes_seconds: float
    gradient_seconds: float  # exposed
    factor_compute_seconds: float
    factor_wait_seconds: float  # exposed exchange of statistics
    invert_seconds: float
    send_seconds: float  # of inverses
    precondition_seconds: float
    return_seconds: float  # of preconditioned gradients, if not every rank preconditions all layers
    factor_bytes: int  # of one exchange of statistics

    def step_seconds(self, factor_update_steps: int = 1, inv_update_steps: int = 1) -> float:
        """Return the seconds of the mean step, with statistics and inversions every N steps."""
        always = self.passes_seconds + self.gradient_seconds + self.precondition_seconds + self.return_seconds
        factors = self.factor_compute_seconds + self.factor_wait_seconds
        return always + factors / factor_update_steps + (self.invert_seconds + self.send_seconds) / inv_update_steps


def predict(plan: KFACPlan, profile: ModelProfile, costs: Costs) -> KFACPrediction:
    """Predict a plan for a model."""
    times = LayerTimes.of_profile(profile, plan.layers)
    plain = _Passes(plan, costs, times, factors=False).run(profile)
    whole = _Passes(plan, costs, times, factors=True)
    seconds = whole.run(profile)
    compute = profile.forward_seconds + sum(profile.backward_seconds)
    statistics = whole.statistics_seconds
    invert, send = inversion_cost(costs, plan)
    return KFACPrediction(
        passes_seconds=compute,
        gradient_seconds=plain - compute,
        factor_compute_seconds=statistics,
        factor_wait_seconds=max(0.0, seconds - plain - statistics),
        invert_seconds=invert,
        send_seconds=send,
        precondition_seconds=_precondition_seconds(plan, costs),
        return_seconds=_return_seconds(plan, costs),
        factor_bytes=whole.factor_bytes,
    )


class _Passes:
    """The compute stream of forward and backward as tasks, and the messages sent meanwhile as programs."""

    def __init__(self, plan: KFACPlan, costs: Costs, times: LayerTimes, *, factors: bool) -> None:
        self._plan, self._costs, self._times, self._factors = plan, costs, times, factors
        self._tasks: list[ComputeTask] = []
        self._parts: list[ProgramPart] = []
        self._after: list[int] = []  # bytes of messages sent after backward
        self._left = Counter({(s, b): len(x) for s, bs in self._buckets() for b, x in enumerate(bs)})
        self._where = {(s, i): b for s, bs in self._buckets() for b, x in enumerate(bs) for i in x}
        self.statistics_seconds = 0.0
        self.factor_bytes = 0

    def _buckets(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        return (0, self._plan.a_buckets), (1, self._plan.g_buckets)

    def run(self, profile: ModelProfile) -> float:
        """Return the seconds until the last message has arrived."""
        place = {layer.name: i for i, layer in enumerate(self._plan.layers)}
        known = sum(module.forward_seconds for module in profile.modules)
        for module in profile.modules:
            if module.name in place:
                self._factor(0, place[module.name], self._times.a_factor)
            self._tasks.append(ComputeTask("forward", module.forward_seconds))
        self._tasks.append(ComputeTask("forward", max(0.0, profile.forward_seconds - known)))
        seen, size = set[str](), 0.0
        for tensor in profile.tensors:
            if tensor.module in place and tensor.module not in seen:
                seen.add(tensor.module)
                self._factor(1, place[tensor.module], self._times.g_factor)
            self._tasks.append(ComputeTask("backward", tensor.backward_seconds))
            size += tensor.size * profile.dtype_bytes
            if size >= GRADIENT_BYTES:
                self._send("gradients", size)
                size = 0.0
        if size:
            self._send("gradients", size)
        for bytes_ in self._after:
            self._send("factors", bytes_)
        self._tasks.append(ComputeTask("end", 0.0, last=True))
        return Machine(self._tasks, [], self._parts, shared=True, streams=None).run()

    def _factor(self, side: int, layer: int, seconds: tuple[float, ...]) -> None:
        if not self._factors:
            return
        share = 1.0 if self._plan.exchange else 1 / self._plan.world_size  # otherwise only of the owner's layers
        self._tasks.append(ComputeTask("factor", seconds[layer] * share))
        self.statistics_seconds += seconds[layer] * share
        if not self._plan.exchange:
            return
        bucket = self._where[side, layer]
        self._left[side, bucket] -= 1
        if self._left[side, bucket]:
            return
        members = self._buckets()[side][1][bucket]
        itemsize = 2 if self._plan.wire_dtype == "bf16" else self._plan.layers[layer].itemsize
        size = itemsize * sum(self._plan.layers[i].packed(side) for i in members)
        self.factor_bytes += round(2 * (self._plan.world_size - 1) / self._plan.world_size * size)
        if self._plan.overlap:
            self._send("factors", size)
        else:
            self._after.append(size)

    def _send(self, name: str, size: float) -> None:
        """Send a message now; programs are numbered in the order of sending."""
        if self._plan.world_size == 1:
            return
        copy = self._costs.compute_seconds("memory", 2 * size)
        seconds = self._costs.seconds("AllReduce", WORLD, self._plan.world_size, size)
        cpu = self._costs.cpu_seconds("AllReduce", size)
        self._tasks.append(ComputeTask(name, 0.0, completes=len(self._parts)))
        hop = Hop("AllReduce", WORLD, "network", seconds, cpu, round(size))
        self._parts.append(ProgramPart(len(self._parts), (copy, copy), (hop,)))


def _precondition_seconds(plan: KFACPlan, costs: Costs) -> float:
    """Return the seconds of two products per layer (four with eigenvectors), for the group with the most work."""
    factor = 4 if plan.method == "eigen" else 2
    flops = Counter[int]()
    for i, layer in enumerate(plan.layers):
        flops[plan.group_of(i)] += factor * layer.d_g * layer.d_a * (layer.d_g + layer.d_a)
    return max(costs.compute_seconds("multiply", n) for n in flops.values())


def _return_seconds(plan: KFACPlan, costs: Costs) -> float:
    members = plan.world_size // plan.workers
    total = 0.0
    for _, layers in plan.returns():
        size = sum(plan.layers[i].d_a * plan.layers[i].d_g * plan.layers[i].itemsize for i in layers)
        total += costs.seconds("Broadcast", WORLD, members, size)
    return total
