"""From tensors in order of arrival to a :class:`Plan`: chooses the fusion rule; the size-threshold rule is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.hierarchy import CollectiveTable, crossing_shares, way_seconds, ways
from thinwire.core.pricing.merge import Merge, fuse, greedy_mgwfbp, greedy_omgs
from thinwire.core.pricing.optimal import optimal_dense, optimal_sparse
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.pricing.ratios import lags
from thinwire.core.program import Method, Plan, PlanBucket, Scope, Topology
from thinwire.core.program.trace import steady_step, trace

_LAUNCH_SECONDS = 4e-3
"""What one more bucket adds to a step on Gloo if every core has a rank (13 against 2 of 43.6 MB, 2 ranks, 2 cores).
With spare cores it is less. The total is flat around its minimum, so one value serves both cases.
"""
_MIN_TAIL = 1 / 16  # of the limit
_SMALL = 1 / 8  # of the limit: a bucket whose exchange nothing hides
_FEW = 4  # with fewer buckets than this, one more costs more than it gains


def balanced(sizes: Sequence[float], seconds: float) -> float:
    """Return the bucket limit on Gloo for plain averages of which overlap can hide ``seconds``; unit as in ``sizes``.

    n buckets cost n launches, and expose 1 / n of what could be hidden, or the last bucket's share: least at
    n = sqrt(seconds / launch). Layers are not split, so a limit of total / n can give up to 2n buckets; their number
    counts (19 instead of the 11 wanted took 4 % of a step of 4 ranks on 2 cores).
    """
    total, wanted = sum(sizes), max(1.0, math.sqrt(seconds / _LAUNCH_SECONDS))

    def cost(limit: float) -> float:
        groups = by_size(sizes, limit)
        exposed = max(1 / len(groups), sum(sizes[i] for i in groups[-1]) / total)
        return len(groups) / wanted + wanted * exposed

    return min((total / wanted * 2 ** (k / 8) for k in range(-8, 9)), key=cost) if total else math.inf


def gain_of_overlap(all_reduce: Callable[[float], float], backward_seconds: float) -> Callable[[float], float]:
    """Return bytes -> seconds of an all-reduce that backward can hide, at most its time: more buckets only queue up."""
    return lambda size: min(all_reduce(size), backward_seconds)


def by_size(sizes: Sequence[float], limit: float, *, first: float | None = None) -> list[list[int]]:
    """Fuse like :func:`~thinwire.core.pricing.merge`, but put a small remainder into the bucket that follows.

    A bucket whose last tensor is a bias would wait for it until its layer's weight arrives, which belongs to the next;
    a bias between two weights that each fill a bucket would be a message of its own, of as many ring steps as a large
    one. A remainder of up to a sixteenth may exceed the ``limit`` (``first``: of the first bucket; 0: a bucket per
    tensor).

    Example:
        >>> by_size([32, 1, 40, 1, 40, 1, 40, 1], 42)
        [[0], [1, 2], [3, 4], [5, 6, 7]]
    """
    return fuse(sizes, limit, first=first, min_tail=_MIN_TAIL * limit)


def started_early(groups: list[list[int]], sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Split a small bucket off the first one, so that the link has work early."""
    if len(groups) < _FEW:
        return groups
    first = groups[0]
    cut = by_size([sizes[i] for i in first], limit, first=_SMALL * limit)
    return [[first[i] for i in group] for group in cut] + groups[1:]


def needed_soon(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Return buckets for a decoupled method: the last one is small, since nothing hides its exchange."""
    last = len(sizes) - 1
    return [[last - i for i in group][::-1] for group in fuse(sizes[::-1], limit, first=_SMALL * limit)][::-1]


RULES = ("optimal", "mgwfbp", "omgs", "lags", "tune")
"""Rules that need a measurement; "tune" begins at the optimum."""


@dataclass(frozen=True)
class Measured:
    profile: ModelProfile
    costs: Costs
    topology: Topology
    side_stream: bool = False


@dataclass(frozen=True)
class BucketIndices:
    """Indices of one bucket, and how many elements a sparse method keeps of it (0: as its density says)."""

    indices: list[int]
    kept: int = 0


def rule_of(method: Method) -> Any:
    return method.fusion_rule or method.fusion


def all_reduce_seconds(costs: Costs, topology: Topology) -> Callable[[float], float]:
    return lambda size: costs.seconds("AllReduce", Scope.WORLD, topology.world_size, round(size))


def hidden_seconds(profile: ModelProfile, costs: Costs, topology: Topology) -> Callable[[float], float]:
    """Return a function: bytes -> all-reduce seconds that backward can hide, for plans that follow the network."""
    return gain_of_overlap(all_reduce_seconds(costs, topology), sum(t.backward_seconds for t in profile.tensors))


def needs_measurement(method: Method) -> bool:
    rule = rule_of(method)
    return (isinstance(rule, str) and rule in RULES) or method.collective == "auto"


def cut(
    rule: str,
    method: Method,
    sizes: list[int],
    payload: Sequence[int],
    seconds: Sequence[float],
    itemsize: int,
    measured: Measured,
    phase: int,
) -> list[BucketIndices]:
    if rule == "lags":
        return _layers(method, sizes, seconds, measured)
    if method.selects:
        merge = _sparse(rule, method, sizes, seconds, measured, phase)
    else:
        price = _exchange(method, max(sizes, default=1), measured, phase)
        merger = greedy_mgwfbp if rule == "mgwfbp" else optimal_dense
        merge = merger(list(payload), list(seconds), lambda n: price(itemsize * n))
    return [BucketIndices(group) for group in merge.groups]


def _sparse(
    rule: str, method: Method, sizes: list[int], seconds: Sequence[float], measured: Measured, phase: int
) -> Merge:
    price = _exchange(method, max(sizes, default=1), measured, phase)

    @cache
    def exchange(n: int) -> float:
        return price(4 * method.payload([(n,)], phase)[0])

    @cache
    def select(n: int) -> float:
        return _first_segment(method, n, measured, phase)

    if rule == "omgs":
        return greedy_omgs(sizes, list(seconds), select, exchange)
    return optimal_sparse(sizes, list(seconds), select, exchange, side_stream=measured.side_stream)


def _layers(method: Any, sizes: list[int], seconds: Sequence[float], measured: Measured) -> list[BucketIndices]:
    """Apply LAGS: one bucket per layer, or fewer if start-ups cost more than they hide, and what is kept of each."""
    world, costs = measured.topology.world_size, measured.costs
    all_reduce = all_reduce_seconds(costs, measured.topology)

    @cache
    def select(n: int) -> float:
        return _first_segment(method, n, measured, 0)

    def exchange(kept: int) -> float:
        return costs.seconds("AllGather", Scope.WORLD, world, 8 * kept)

    def filled(groups: list[list[int]]) -> tuple[float, list[BucketIndices]]:
        ratios = lags(
            [sum(sizes[i] for i in group) for group in groups],
            [sum(seconds[i] for i in group) for group in groups],
            select,
            exchange,
            lambda n: all_reduce(4 * n),
            method.max_ratio,
            exposed_seconds=method.exposed_seconds,
            side_stream=measured.side_stream,
        )
        return ratios.finish_seconds, [BucketIndices(group, kept) for group, kept in zip(groups, ratios.kept)]

    ends, alone = filled([[i] for i in range(len(sizes))])
    if method.fusion == "none":
        return alone
    least = method.least
    merge = optimal_sparse(sizes, list(seconds), select, lambda n: exchange(least(n)), side_stream=measured.side_stream)
    sooner, merged = filled(merge.groups)
    return merged if sooner < _SOONER * ends else alone


_SOONER = 0.9
"""LAGS: layers share messages only if backward and exchanges then end that much sooner; alone they hide more."""


def _exchange(method: Method, size: int, measured: Measured, phase: int) -> Callable[[int], float]:
    """Return a function: bytes of a message -> seconds of its exchanges, of the kinds that the program yields."""
    topology, costs = measured.topology, measured.costs
    if method.collective == "auto":
        return lambda size: min(way_seconds(way, size, costs, topology) for way in ways(topology))
    first, beside = (
        [s for s in trace(method, [("x", (size,))], topology, rank=r, step=steady_step(method, phase)) if s.scope]
        for r in (0, 1 if topology.layout[0] > 1 else 0)
    )
    largest = max((s.message_bytes for s in first), default=1) or 1
    crossing = crossing_shares(first, beside, topology.layout[0])
    hops = [
        (s.kind, s.scope, len(topology.members(s.scope, 0)), s.message_bytes / largest, share)
        for s, share in zip(first, crossing)
        if s.scope
    ]

    def price(message_bytes: int) -> float:
        return sum(costs.seconds(kind, scope, n, message_bytes * part, share) for kind, scope, n, part, share in hops)

    return price


def _first_segment(method: Method, size: int, measured: Measured, phase: int) -> float:
    seconds = method.compute_seconds([(size,)], phase, measured.topology, measured.costs) if size else None
    return seconds[0] if seconds else 0.0


_MIB = 1 << 20
_LOW_RANK_BYTES = 256 << 10
"""Payload of a low-rank bucket: at rank 4 a 10 M model is one bucket; at rank 32, ten that overlap with backward."""


@dataclass(frozen=True)
class PlanTensor:
    """One gradient, as a plan sees it; ``dense``: averaged in S-SGD buckets. Those of one ``dtype`` may join."""

    name: str
    shape: tuple[int, ...]
    dense: bool = False
    dtype: str = "float32"
    itemsize: int = 4

    @property
    def size(self) -> int:
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
            (:func:`~thinwire.core.pricing.plans.gain_of_overlap`); None: derived from ``measured``, or fixed sizes if
            that is None too.
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
        table = CollectiveTable(measured.costs, measured.topology)
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
