"""From a method, a model, a cluster and prices to a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from thinwire.core.checks import check_number
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import Measured, PlanTensor, hidden_seconds, make_plan, needs_measurement
from thinwire.core.pricing.profiles import ModelProfile, ModuleTime
from thinwire.core.program import Method, Plan, PlanBucket, Topology
from thinwire.core.program.plan import SIDE_STREAMS
from thinwire.predict.timeline.local_steps import OneWorker, OwnPace, Period, Periodic, simulate_period
from thinwire.predict.timeline.machine import ComputeTask, Machine
from thinwire.predict.timeline.programs import Place, ProgramPart, parts_of
from thinwire.predict.timeline.result import Event, Timeline, exposed_seconds


def simulate(
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
) -> Timeline:
    """Simulate a training step, without data and without a network.

    One rank stands for all: the slowest, on the largest machine. An exchange takes its priced time from when this rank
    issues it; each link serves first come, first served. WORLD and CROSS share the network card; traffic inside a
    machine has a link of its own.

    Args:
        method: its own programs are run on shapes, once per distinct bucket.
        model_profile: tensors in backward order, with their times.
        plan: which tensors share a bucket; None: the plan that ``attach`` makes of this order.
        backend: "gloo" or "nccl", for the plan's defaults and the order of programs: on NCCL one after the other.
        dense: program of the plan's dense buckets; None: S-SGD.
        shared_compute: the method's segments and the CPU time of the exchanges delay forward and backward; False: they
            have a core or a stream of their own.
        optimizer_seconds: time of the whole update; a deferred bucket's share comes before its first layer's forward.
        slowdown: factor on all compute, or one per rank, of which the largest counts; see :func:`computing`.
        steps: number of steps (with phases: of rounds); the last is reported. With 1, nothing was deferred before it.

    Raises:
        ValueError: arguments out of range, a plan that does not fit, or a method whose prices do not fit its program.
        LookupError: the costs lack a curve.
    """
    factors = _factors(slowdown, topology)
    factor, paced = max(factors), computing(method, factors)
    check_number("optimizer_seconds", optimizer_seconds, least=0)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r} is unknown; use 'gloo' or 'nccl'")
    if plan is None:
        plan = plan_of(method, model_profile, backend, topology, costs, side_stream=not shared_compute)
    plan.check(tensor.name for tensor in model_profile.tensors)
    profile = model_profile if paced == 1 else model_profile.scaled(paced)
    place, phases = Place(topology), len(plan.phases)
    program = method.carrier if isinstance(method, Periodic) else method
    parts = [
        [(_slowed(now, factor), _slowed(later, factor) if later else None) for now, later in phase]
        for phase in (parts_of(program, dense or SSGD(), plan, p, profile, place, costs) for p in range(phases))
    ]
    streams = SIDE_STREAMS if backend == "nccl" else None
    if isinstance(method, Periodic):
        periods = [
            simulate_period(method, profile, [now for now, _ in phase], shared=shared_compute, streams=streams,
                            optimizer_seconds=optimizer_seconds * paced)
            for phase in parts
        ]  # fmt: skip
        return _mean_of(periods, plan, method.every)
    start = exposed = 0.0
    sent = 0
    events: list[Event] = []
    for step in range((steps - 1) * phases, steps * phases):
        current, before = parts[step % phases], parts[(step - 1) % phases] if step else []
        tasks, deferred = tasks_of(
            profile,
            plan.phases[step % phases],
            {now.bucket for now, later in current if later},
            plan.phases[(step - 1) % phases],
            [later for _, later in before if later],
            optimizer_seconds * paced,
        )
        issued = [now for now, _ in current]
        machine = Machine(tasks, deferred, issued, shared=shared_compute, streams=streams)
        seconds = machine.run()
        exposed += exposed_seconds(machine.events)
        sent += sum(event.bytes for event in machine.events)
        events += _from(start, machine.events)
        start += seconds
    events.sort(key=lambda event: event.start_seconds)
    return Timeline(start / phases, exposed / phases, tuple(events), round(sent / phases), plan)


def plan_of(
    method: Method,
    profile: ModelProfile,
    backend: str,
    topology: Topology | None = None,
    costs: Costs | None = None,
    *,
    side_stream: bool | None = None,
) -> Plan:
    """Return the plan that ``attach`` makes for tensors arriving in the profile's order, once it knows the network.

    ``side_stream``: methods compute alongside backward; None: on NCCL, as devices do by default.
    """
    if isinstance(method, Periodic):
        method = method.carrier
    dense = [method.dense(t.name, t.shape, t.kind in ("Embedding", "EmbeddingBag")) for t in profile.tensors]
    itemsize = profile.dtype_bytes
    tensors = [PlanTensor(t.name, t.shape, d, f"{itemsize}", itemsize) for t, d in zip(profile.tensors, dense)]
    known = measured = None
    if topology is not None and costs is not None:
        known = hidden_seconds(profile, costs, topology)
        beside = backend == "nccl" if side_stream is None else side_stream
        measured = Measured(profile, costs, topology, beside) if needs_measurement(method) else None
    return make_plan(method, tensors, range(len(tensors)), (), backend, measured, known)


def _from(start: float, events: Sequence[Event]) -> Sequence[Event]:
    return [replace(e, start_seconds=e.start_seconds + start) for e in events] if start else events


def _mean_of(periods: Sequence[Period], plan: Plan, every: int | None) -> Timeline:
    steps, start = sum(period.every for period in periods), 0.0
    events: list[Event] = []
    for period in periods:
        events += _from(start, period.events)
        start += period.seconds
    events.sort(key=lambda event: event.start_seconds)
    exposed = sum(period.exposed_seconds for period in periods)
    sent = sum(period.bytes_sent for period in periods)
    return Timeline(start / steps, exposed / steps, tuple(events), round(sent / steps), plan, every or 1)


def computing(method: Method, slowdown: Sequence[float]) -> float:
    """Return the factor on forward and backward: in step the slowest rank's; the fastest's, if it need not wait."""
    if isinstance(method, OwnPace):
        return min(slowdown) * method.stretch
    return (min if isinstance(method, OneWorker) else max)(slowdown)


def _factors(slowdown: float | Sequence[float], topology: Topology) -> list[float]:
    factors = [slowdown] if isinstance(slowdown, (int, float)) else list(slowdown)
    if not isinstance(slowdown, (int, float)) and len(factors) != topology.world_size:
        raise ValueError(f"slowdown has {len(factors)} entries for {topology.world_size} ranks")
    for i, value in enumerate(factors):
        check_number(f"slowdown[{i}]", value, least=0)
    return [float(value) for value in factors]


def _slowed(part: ProgramPart, factor: float) -> ProgramPart:
    if factor == 1:
        return part
    hops = tuple(replace(hop, cpu_seconds=hop.cpu_seconds * factor) for hop in part.hops)
    return ProgramPart(part.bucket, tuple(seconds * factor for seconds in part.segments), hops)


def tasks_of(
    profile: ModelProfile,
    buckets: Sequence[PlanBucket],
    deferring: Set[int],
    buckets_before: Sequence[PlanBucket],
    deferred: Sequence[ProgramPart],
    optimizer_seconds: float,
) -> tuple[list[ComputeTask], list[ProgramPart]]:
    """Return the compute stream's tasks, and the deferred parts in the order in which their layers are needed."""
    modules = _modules(profile)
    size_of = {tensor.name: tensor.size for tensor in profile.tensors}
    total = max(1, profile.elements)

    def update_seconds(bucket: PlanBucket) -> float:
        return optimizer_seconds * sum(size_of[name] for name in bucket.names) / total

    need = _first_need(profile, modules)
    wanted = sorted(deferred, key=lambda p: (min(need[name] for name in buckets_before[p.bucket].names), -p.bucket))
    tasks: list[ComputeTask] = []
    position = 0
    for number, module in enumerate(modules):
        while position < len(wanted):
            bucket = wanted[position].bucket
            if min(need[name] for name in buckets_before[bucket].names) > number:
                break
            tasks.append(ComputeTask("optimizer", update_seconds(buckets_before[bucket]), bucket, needs=position))
            position += 1
        tasks.append(ComputeTask(f"forward {module.name}", module.forward_seconds))
    tasks += _backward(profile, buckets)
    later = sum(update_seconds(buckets[b]) for b in deferring)
    owed = optimizer_seconds if not deferring else max(0.0, optimizer_seconds - later)
    tasks.append(ComputeTask("optimizer", owed, last=True))
    return tasks, wanted


def _backward(profile: ModelProfile, buckets: Sequence[PlanBucket]) -> list[ComputeTask]:
    """Return one task per gradient; the task that fills a bucket starts its program."""
    bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
    left = Counter(bucket_of.values())
    tasks = []
    for tensor in profile.tensors:
        bucket = bucket_of[tensor.name]
        left[bucket] -= 1
        completes = None if left[bucket] else bucket
        tasks.append(ComputeTask(f"backward {tensor.name}", tensor.backward_seconds, bucket, completes=completes))
    return tasks


def _modules(profile: ModelProfile) -> list[ModuleTime]:
    """Return the modules in forward order; their seconds add up to the profile's forward pass.

    Without modules: the owners of the tensors, the last gradient's first, in proportion to their backward seconds.
    """
    modules = list(profile.modules)
    if not modules:
        weights: dict[str, float] = {}
        for tensor in reversed(profile.tensors):
            weights[tensor.module] = weights.get(tensor.module, 0.0) + tensor.backward_seconds
        modules = [ModuleTime(name, weight) for name, weight in weights.items()] or [ModuleTime("model", 0.0)]
    total = sum(module.forward_seconds for module in modules)
    if total > 0:
        return [ModuleTime(m.name, m.forward_seconds / total * profile.forward_seconds) for m in modules]
    return [ModuleTime(m.name, profile.forward_seconds / len(modules)) for m in modules]


def _first_need(profile: ModelProfile, modules: Sequence[ModuleTime]) -> dict[str, int]:
    """Map each tensor to the index of the module that needs it: its owner, else the nearest enclosing one, else 0."""
    places: dict[str, int] = {}
    for place, module in enumerate(modules):
        places.setdefault(module.name, place)
    need = {}
    for tensor in profile.tensors:
        owner = tensor.module
        while owner and owner not in places:
            owner = owner.rpartition(".")[0]
        need[tensor.name] = places.get(owner, 0)
    return need


Bound: TypeAlias = Literal["compute", "network bandwidth", "network latency", "method compute"]


def bound_by(
    method: Method,
    model_profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    *,
    plan: Plan | None = None,
    backend: str = "gloo",
    optimizer_seconds: float = 0.0,
    **options: Any,
) -> Bound:
    """Return the resource whose removal shortens the step most; arguments as in ``simulate``, the plan stays the same.

    "compute" is forward, backward and optimizer; "method compute" is the methods' segments. CPU time of the exchanges
    counts as network: its rate as bandwidth, its start-up as latency.
    """
    if plan is None:
        beside = not options.get("shared_compute", True)
        plan = plan_of(method, model_profile, backend, topology, costs, side_stream=beside)

    def seconds(profile: ModelProfile, priced: Costs, update: float) -> float:
        where = {"plan": plan, "backend": backend, "optimizer_seconds": update, **options}
        return simulate(method, profile, topology, priced, **where).step_seconds

    free = {name: curve.stretched(0, 0, "free") for name, curve in costs.compute.items()}
    without: dict[Bound, float] = {
        "compute": seconds(model_profile.scaled(0.0), costs, 0.0),
        "network bandwidth": seconds(model_profile, network_free(costs, startup=1, rest=0), optimizer_seconds),
        "network latency": seconds(model_profile, network_free(costs, startup=0, rest=1), optimizer_seconds),
        "method compute": seconds(model_profile, replace(costs, compute=free), optimizer_seconds),
    }
    return min(without, key=lambda name: without[name])


def network_free(costs: Costs, *, startup: int, rest: int) -> Costs:
    return replace(
        costs,
        exchanges={key: curve.stretched(startup, rest, "made free") for key, curve in costs.exchanges.items()},
        cpu_share={kind: line.stretched(startup, rest, "made free") for kind, line in costs.cpu_share.items()},
    )
