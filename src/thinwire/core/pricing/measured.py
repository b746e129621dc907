"""Cutting tensors of one kind into buckets after compute and network have been measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.hierarchy import crossing_shares, way_seconds, ways
from thinwire.core.pricing.merge import Merge, greedy_mgwfbp, greedy_omgs, optimal_dense, optimal_sparse
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.pricing.ratios import lags
from thinwire.core.pricing.sizes import gain_of_overlap
from thinwire.core.program import Method, Scope, Topology
from thinwire.core.program.trace import steady_step, trace

RULES = ("optimal", "mgwfbp", "omgs", "lags", "tune")
"""Rules that need a measurement; "tune" begins at the optimum."""


@dataclass(frozen=True)
class Measured:
    """The measurements that such a rule uses.

    Attributes:
        profile: tensors and their backward seconds.
        costs: costs of exchanges and compute.
        topology: topology of the ranks.
        side_stream: methods compute alongside backward, on a core or stream of their own.
    """

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
    """Return the fusion rule of a method: a word, a number of MiB, or a ``Merge``."""
    return method.fusion_rule or method.fusion


def all_reduce_seconds(costs: Costs, topology: Topology) -> Callable[[float], float]:
    """Return a function: bytes -> seconds of one all-reduce over all ranks."""
    return lambda size: costs.seconds("AllReduce", Scope.WORLD, topology.world_size, round(size))


def hidden_seconds(profile: ModelProfile, costs: Costs, topology: Topology) -> Callable[[float], float]:
    """Return a function: bytes -> all-reduce seconds that backward can hide, for plans that follow the network."""
    return gain_of_overlap(all_reduce_seconds(costs, topology), sum(t.backward_seconds for t in profile.tensors))


def needs_measurement(method: Method) -> bool:
    """Return whether the method's plan depends on measured times."""
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
    """Cut tensors into buckets.

    Args:
        rule: one of ``RULES``.
        method: the method whose program handles them.
        sizes: elements of each tensor, in backward order.
        payload: payload of each tensor by itself, as ``Method.payload`` gives it.
        seconds: backward time, from the previous tensor (of this kind) to this one.
        itemsize: bytes of one payload element.
        measured: profile, costs and topology.
        phase: phase of the method.
    """
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
    """Apply LAGS: one bucket per layer, with the number of elements kept of each."""
    world, costs = measured.topology.world_size, measured.costs
    all_reduce = all_reduce_seconds(costs, measured.topology)

    def exchange(kept: int) -> float:
        return costs.seconds("AllGather", Scope.WORLD, world, 8 * kept)

    ratios = lags(
        sizes,
        list(seconds),
        lambda n: _first_segment(method, n, measured, 0),
        exchange,
        lambda n: all_reduce(4 * n),
        method.max_ratio,
        exposed_seconds=method.exposed_seconds,
        side_stream=measured.side_stream,
    )
    return [BucketIndices([i], kept) for i, kept in enumerate(ratios.kept)]


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
