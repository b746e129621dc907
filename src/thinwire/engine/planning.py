"""From parameters in order of arrival to a :class:`Plan`: the size-threshold rule and its defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.engine.parameters import Managed
from thinwire.planner.merge import fuse
from thinwire.program import Method, Plan, PlanBucket, Topology
from thinwire.program.trace import Step, trace

_MIB = 1 << 20


def default_merge(method: Method, backend: str) -> Any:
    """What ``merge="auto"`` means until a measured plan replaces it."""
    if backend == "nccl":
        return 25
    # Low-rank payloads are so small that start-ups outweigh overlap; dense ones gain from an early start.
    return "single" if method.name in ("acp", "powersgd") else 4


def _limit(merge: Any, method: Method, entries: Sequence[Managed], payload: Sequence[int]) -> float:
    """The fusion limit in payload elements: the MiB of dense gradient, scaled to what is sent."""
    if merge == "none":
        return 0.0
    if merge == "single":
        return float("inf")
    dense = sum(m.parameter.numel() for m in entries)
    itemsize = entries[0].parameter.element_size()
    return float(merge) * _MIB / itemsize * sum(payload) / max(1, dense)


def make_plan(
    method: Method, managed: Sequence[Managed], order: Sequence[int], late: Iterable[int], backend: str
) -> Plan:
    """Fuse parameters into buckets.

    Args:
        method: gives payloads and phases.
        managed: all parameters.
        order: their indices in order of arrival.
        late: indices that did not arrive; they come last, apart from those that did.
        backend: of the process group, for the defaults.
    """
    last = set(late)
    order = [i for i in order if i not in last] + [i for i in order if i in last]
    place = {index: position for position, index in enumerate(order)}
    groups: dict[tuple[Any, ...], list[Managed]] = {}
    for index in order:
        m = managed[index]
        groups.setdefault((m.dense, m.parameter.dtype, index in last), []).append(m)
    phases = []
    for phase in range(method.phases):
        buckets: list[tuple[int, PlanBucket]] = []
        for (dense, _, _), entries in groups.items():
            merge = method.merge
            if merge == "auto":
                merge = 25 if backend == "nccl" else 4
                if not dense:
                    merge = default_merge(method, backend)
            shapes = [m.shape for m in entries]
            payload = [m.parameter.numel() for m in entries] if dense else method.payload(shapes, phase)
            for part in fuse(payload, _limit(merge, method, entries, payload)):
                names = tuple(entries[i].name for i in part)
                buckets.append((max(place[entries[i].index] for i in part), PlanBucket(names, dense)))
        phases.append(tuple(bucket for _, bucket in sorted(buckets, key=lambda pair: pair[0])))
    return Plan(tuple(phases), rule=f"{method.name}, merge={method.merge}")


def trace_plan(
    plan: Plan, method: Method, dense: Method, managed: Sequence[Managed], topology: Topology, rank: int
) -> list[list[list[Step]]]:
    """The collectives of every bucket of every phase, found by running the programs on shapes alone."""
    by_name = {m.name: m for m in managed}
    result = []
    for phase, buckets in enumerate(plan.phases):
        traced = []
        for bucket in buckets:
            entries = [by_name[name] for name in bucket.names]
            program = dense if bucket.dense else method
            shapes = [(m.name, m.shape) for m in entries]
            traced.append(trace(program, shapes, topology, rank=rank, step=phase, dtype=entries[0].parameter.dtype))
        result.append(traced)
    return result
