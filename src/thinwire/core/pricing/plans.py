"""From tensors in order of arrival to a :class:`Plan`: the size-threshold rule and its defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.core.pricing.hierarchy import CollectiveTable
from thinwire.core.pricing.measured import RULES, BucketIndices, Measured, cut, hidden_seconds, rule_of
from thinwire.core.pricing.merge import Merge
from thinwire.core.pricing.sizes import balanced, by_size, needed_soon, started_early
from thinwire.core.program import Method, Plan, PlanBucket

_MIB = 1 << 20
_LOW_RANK_BYTES = 256 << 10
"""Payload of a low-rank bucket: at rank 4 a 10 M model is one bucket; at rank 32, ten that overlap with backward."""


@dataclass(frozen=True)
class PlanTensor:
    """One gradient, as a plan sees it.

    Attributes:
        name: name of the parameter.
        shape: logical shape.
        dense: not handled by the method, but averaged in S-SGD buckets.
        dtype: any text; tensors with the same text may share a bucket.
        itemsize: bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    dense: bool = False
    dtype: str = "float32"
    itemsize: int = 4

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def default_fusion(method: Method, backend: str) -> Any:
    """Return what ``fusion="auto"`` means before the network is measured: MiB of dense gradient, or "payload"."""
    if backend == "nccl":
        return 25
    # Low-rank payloads are so small that start-ups outweigh overlap; dense ones gain from an early start.
    return "payload" if method.bucket_unit == "payload" else 4


def follows_network(method: Method, backend: str) -> bool:
    """Return whether a method's ``fusion="auto"`` follows the network: plain averages on Gloo, coupled, flat."""
    plain = method.cheap_pack and method.collective == "flat" and not method.deterministic
    return plain and backend == "gloo" and not method.decoupled and rule_of(method) == "auto"


def make_plan(
    method: Method,
    tensors: Sequence[PlanTensor],
    order: Sequence[int],
    late: Iterable[int],
    backend: str,
    measured: Measured | None = None,
    all_reduce: Callable[[float], float] | None = None,
) -> Plan:
    """Fuse tensors into buckets.

    Args:
        method: provides payloads and phases.
        tensors: all of them.
        order: their indices in order of arrival.
        late: indices that did not arrive; they come last, separate from those that did.
        backend: backend of the process group, for the defaults.
        measured: for the rules that need it; None: these fuse by size for the time being.
        all_reduce: for ``fusion="auto"``: bytes -> seconds of an all-reduce over all ranks that backward can hide
            (:func:`~thinwire.core.pricing.sizes.gain_of_overlap`); None: derived from ``measured``, or fixed sizes if
            that is None too.

    Raises:
        ValueError: a ``Merge`` made for other tensors.
    """
    seconds = {} if measured is None else {t.name: t.backward_seconds for t in measured.profile.tensors}
    last = set(late)
    order = [i for i in order if i not in last] + [i for i in order if i in last]
    place = {index: position for position, index in enumerate(order)}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in order:
        t = tensors[index]
        groups.setdefault((t.dense, t.dtype, index in last), []).append(index)
    if all_reduce is None and measured is not None:
        all_reduce = hidden_seconds(measured.profile, measured.costs, measured.topology)
    table = None  # how sums are routed, if that depends on measurements
    if measured is not None and method.collective == "auto":
        table = CollectiveTable.of(measured.costs, measured.topology)
    phases = []
    for phase in range(method.phases):
        buckets: list[tuple[int, PlanBucket]] = []
        for (dense, _, _), indices in groups.items():
            entries = [tensors[i] for i in indices]
            rule = _rule(method, dense, backend, measured is not None)
            payload = [t.size for t in entries] if dense else method.payload([t.shape for t in entries], phase)
            if isinstance(rule, Merge):
                parts = _given(rule, len(entries))
            elif measured is not None and rule in RULES:
                waits = _since_last_of_kind(order, indices, [seconds.get(tensors[i].name, 0.0) for i in order])
                parts = cut(
                    rule, method, [t.size for t in entries], payload, waits, entries[0].itemsize, measured, phase
                )
            else:
                if all_reduce is not None and not dense and follows_network(method, backend):
                    limit = balanced(payload, all_reduce(entries[0].itemsize * sum(payload)))
                else:
                    limit = _limit(rule, entries, payload)
                free = rule_of(method) in ("auto", "tune")  # the user has not set a size
                soon = free and method.decoupled
                lists = needed_soon(payload, limit) if soon else by_size(payload, limit)
                if free and rule != "payload":
                    lists = started_early(lists, payload, limit)
                parts = [BucketIndices(group) for group in lists]
            for part in parts:
                names = tuple(entries[i].name for i in part.indices)
                way = ""
                if measured is not None and not dense:
                    shapes = [entries[i].shape for i in part.indices]
                    way = method.plan_exchange(shapes, part.kept, measured.topology, measured.costs)
                sent = entries[0].itemsize * sum(payload[i] for i in part.indices)
                bucket = PlanBucket(names, dense, part.kept, table.choice(sent) if table else "", way)
                buckets.append((max(place[indices[i]] for i in part.indices), bucket))
        phases.append(tuple(bucket for _, bucket in sorted(buckets, key=lambda pair: pair[0])))
    return Plan(tuple(phases), rule=f"{method.name}, fusion={method.fusion}{', measured' if measured else ''}")


def _rule(method: Method, dense: bool, backend: str, measured: bool) -> Any:
    """Return the rule for one kind of tensors. Without a measurement, size decides at first."""
    rule = rule_of(method)
    if dense:  # the few tensors that the method does not handle
        rule = rule if isinstance(rule, (int, float)) or rule in ("none", "single") else "auto"
    if isinstance(rule, str) and rule in RULES and not measured:
        rule = method.fusion if method.fusion_rule else "auto"
    if rule == "auto":
        return (25 if backend == "nccl" else 4) if dense else default_fusion(method, backend)
    return rule


def _since_last_of_kind(order: Sequence[int], indices: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return the backward seconds from one tensor of a kind to the next, counting other kinds in between."""
    wanted, waits, passed = set(indices), [], 0.0
    for index, lasted in zip(order, seconds):
        passed += lasted
        if index in wanted:
            waits.append(passed)
            passed = 0.0
    return waits


def _given(merge: Merge, count: int) -> list[BucketIndices]:
    if [i for group in merge.groups for i in group] != list(range(count)):
        raise ValueError(f"the Merge does not fit the model's {count} tensors: make it from this model's sizes")
    return [BucketIndices(list(group)) for group in merge.groups]


def _limit(merge: Any, entries: Sequence[PlanTensor], payload: Sequence[int]) -> float:
    """Return the fusion limit in payload elements: the MiB of dense gradient, scaled to what is sent."""
    if merge == "none":
        return 0.0
    if merge == "single":
        return float("inf")
    if merge == "payload":
        return _LOW_RANK_BYTES / entries[0].itemsize
    dense = sum(t.size for t in entries)
    return float(merge) * _MIB / entries[0].itemsize * sum(payload) / max(1, dense)
