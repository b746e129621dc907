"""Small methods, models and prices that the tests of the simulator share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.profiles import ModelProfile, ModuleTime, TensorTime
from thinwire.core.program import CROSS, NODE, AllGather, AllReduce, Method, NextForward, ReduceScatter

FREE = dict.fromkeys(("memory", "select", "multiply", "orthogonalise"), Linear(0, 0))


@dataclass(frozen=True)
class DeAR(Method):
    """Reduce-scatter in backward, all-gather in the next forward."""

    name = "dear"
    fusion: object = "none"

    def reduce(self, bucket, state):
        shard = yield ReduceScatter(bucket.flat)
        yield NextForward()
        yield AllGather(shard)


@dataclass(frozen=True)
class Hierarchical(Method):
    """Inside the machine, across machines, inside again."""

    name = "hierarchical"
    fusion: object = "none"

    def reduce(self, bucket, state):
        shard = yield ReduceScatter(bucket.flat, NODE)
        shard = yield AllReduce(shard, CROSS)
        yield AllGather(shard, NODE)


@dataclass(frozen=True)
class Selecting(Method):
    """A priced selection before one exchange of everything, nothing after it."""

    name = "selecting"
    fusion: object = "none"

    def compute_seconds(self, shapes, phase, topology, costs):
        return [costs.compute_seconds("select", sum(math.prod(s) for s in shapes)), 0.0]

    def reduce(self, bucket, state):
        yield AllReduce(bucket.flat)


def profile_of(sizes, seconds, forward=0.5):
    """One module per tensor, all with the same forward seconds."""
    tensors = tuple(TensorTime(f"m{i}.w", (size,), t) for i, (size, t) in enumerate(zip(sizes, seconds)))
    modules = tuple(ModuleTime(f"m{i}", forward / len(tensors)) for i in reversed(range(len(tensors))))
    return ModelProfile("random", tensors, forward, modules)


def costs_of(curve, workers, kind="AllReduce", compute=FREE, **more):
    return Costs({(kind, "world", workers): curve}, compute, **more)


def lane(timeline, *names):
    return [event for event in timeline.events if event.lane in names]


def busy(events):
    return sum(event.duration_seconds for event in events)


def overlap(events):
    """Whether two of them run at the same time."""
    ordered = sorted(events, key=lambda e: (e.start_seconds, e.end_seconds))
    return any(b.start_seconds < a.end_seconds - 1e-12 for a, b in itertools.pairwise(ordered))
