"""The programs of a plan as priced parts: seconds of each segment, and the exchanges between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from thinwire.core.checks import check_seconds
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.hierarchy import crossing_shares
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Bucket, Method, Plan, Program, Scope, Shapes, State, Topology
from thinwire.core.program.trace import TracedExchange, steady_step, trace

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Hop:
    name: str
    scope: Scope
    link: str
    seconds: float
    cpu_seconds: float
    sent_bytes: int
    travel_seconds: float = 0.0
    """Of its seconds, those that leave the link free."""


@dataclass(frozen=True)
class ProgramPart:
    """A piece of one bucket's program without a pause: segment, exchange, segment, ..., segment."""

    bucket: int
    segments: tuple[float, ...]
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class _Short(Method):
    """A program up to its last exchange (what follows may loop over ranks); not ``strict``: or ended earlier."""

    whole: Method
    yields: int
    strict: bool = True

    def reduce(self, bucket: Bucket, state: State) -> Program:
        program = self.whole.reduce(bucket, state)
        value: Any = None
        for number in range(self.yields):
            try:
                op = program.send(value)
            except StopIteration:
                if not self.strict:
                    return
                raise ValueError(f"{self.whole.name} prices {self.yields + 1} segments but has {number + 1}") from None
            value = yield op
        program.close()


class Place:
    """The rank that stands for all: the first on the largest machine, so that its groups are the largest."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        layout = topology.layout
        largest = max(layout)
        self.rank = sum(layout[: layout.index(largest)])
        self.members = {Scope.WORLD: topology.world_size, Scope.NODE: largest, Scope.CROSS: topology.nodes}
        outside = "network" if topology.nodes > 1 else "inside"
        self.links = {Scope.WORLD: outside, Scope.NODE: "inside", Scope.CROSS: outside}

    def __hash__(self) -> int:
        return hash(self.topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.topology == self.topology


def _traced(
    method: Method, shapes: Shapes, place: Place, phase: int, itemsize: int, yields: int | None, kept: int
) -> list[tuple[TracedExchange, float]]:
    """Return a bucket's exchanges, each with the share of the node's ranks that issue it, traced once a shape."""
    try:
        hash(method)
    except TypeError:  # an option that is a list
        return _steps.__wrapped__(method, shapes, place, phase, itemsize, yields, kept)
    return _steps(method, shapes, place, phase, itemsize, yields, kept)


@lru_cache(maxsize=4096)
def _steps(
    method: Method, shapes: Shapes, place: Place, phase: int, itemsize: int, yields: int | None, kept: int
) -> list[tuple[TracedExchange, float]]:
    named = [(str(i), shape) for i, shape in enumerate(shapes)]
    program = method if yields is None else _Short(method, yields)

    def of(program: Method, rank: int) -> list[TracedExchange]:
        step = steady_step(method, phase)
        return trace(program, named, place.topology, rank=rank, step=step, dtype=DTYPES[itemsize], kept=kept)

    steps, ranks = of(program, place.rank), place.members[Scope.NODE]
    if ranks == 1 or all(step.scope is not Scope.CROSS for step in steps):
        return [(step, 1.0) for step in steps]
    beside = of(program if yields is None else _Short(method, yields, strict=False), place.rank + 1)
    return list(zip(steps, crossing_shares(steps, beside, ranks)))


def parts_of(
    method: Method, dense: Method, plan: Plan, phase: int, profile: ModelProfile, place: Place, costs: Costs
) -> list[tuple[ProgramPart, ProgramPart | None]]:
    """Return, per bucket of a phase, what runs during backward and what may wait for the next forward, if any."""
    if profile.dtype_bytes not in DTYPES:
        raise ValueError(f"gradients of {profile.dtype_bytes} bytes cannot be simulated, only of 2, 4 or 8")
    shape_of = {tensor.name: tensor.shape for tensor in profile.tensors}
    known: dict[tuple[bool, Shapes, int, str, str], tuple[list[float], list[tuple[TracedExchange, float]]]] = {}
    parts = []
    for index, bucket in enumerate(plan.phases[phase]):
        key = (
            bucket.dense,
            tuple(shape_of[name] for name in bucket.names),
            bucket.kept,
            bucket.collective,
            bucket.exchange,
        )
        if key not in known:
            program = bucket.applied(dense if bucket.dense else method)
            empty = not any(map(math.prod, key[1]))
            seconds = None if empty else program.compute_seconds(key[1], phase, place.topology, costs)
            yields = None if seconds is None else len(seconds) - 1
            steps = _traced(program, key[1], place, phase, profile.dtype_bytes, yields, bucket.kept)
            free = [0.0] * (len(steps) + 1)
            known[key] = (free if seconds is None else check_seconds(seconds, len(free), "compute_seconds"), steps)
        parts.append(_split(index, *known[key], place, costs))
    return parts


def _split(
    bucket: int, seconds: list[float], steps: list[tuple[TracedExchange, float]], place: Place, costs: Costs
) -> tuple[ProgramPart, ProgramPart | None]:
    """Split a program at its first pause; further pauses have no meaning."""
    segments: list[list[float]] = [[seconds[0]]]
    hops: list[list[Hop]] = [[]]
    for (step, share), after in zip(steps, seconds[1:]):
        if step.scope is None and len(hops) == 1:
            segments.append([after])
            hops.append([])
        elif step.scope is None:
            segments[-1][-1] += after
        else:
            priced = costs.seconds(step.kind, step.scope, place.members[step.scope], step.message_bytes, share)
            cpu = costs.cpu_seconds(step.kind, step.message_bytes)
            far = costs.travel_seconds(step.kind, step.scope, place.members[step.scope])
            link, far = place.links[step.scope], min(far, priced)
            hops[-1].append(Hop(step.kind, step.scope, link, priced, cpu, step.sent_bytes, far))
            segments[-1].append(after)
    made = [ProgramPart(bucket, tuple(s), tuple(h)) for s, h in zip(segments, hops)]
    return made[0], made[1] if len(made) > 1 else None
