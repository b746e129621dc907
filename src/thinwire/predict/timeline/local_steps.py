"""Local steps on the timeline: a period of steps without exchange, and one round beside or between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.periods import LONGER, LONGEST, calendar, layers, nanoseconds, steps_late
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Bucket, Method, Plan, Program, State
from thinwire.core.program.plan import PlanBucket
from thinwire.predict.timeline.machine import ComputeTask, Machine
from thinwire.predict.timeline.programs import ProgramPart
from thinwire.predict.timeline.result import Event, exposed_seconds


@dataclass(frozen=True)
class Periodic(Method):
    """Local steps (``thinwire.Local``) as the planner sees them: a codec's program every few steps, in one bucket.

    ``every`` None: ``choose.resolved`` chooses, up to ``most``. ``delay``: steps that run while a round is in flight;
    "full": all but one; "auto": chosen with ``every``. ``schedule`` "dream": layers go after the steps that hide them.
    ``look``: beta of a look-ahead, which takes no time.
    """

    name: ClassVar[str] = "local"
    loss: ClassVar[str] = "apart between rounds"

    codec: Method
    every: int | None = None
    delay: int | str = "auto"
    most: int = LONGEST
    outer: bool = False
    schedule: str = "strided"
    look: float = 0.0

    def reduce(self, bucket: Bucket, state: State) -> Program:
        yield from self.codec.reduce(bucket, state)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        return self.codec.dense(name, shape, embedding)

    @property
    def travelling(self) -> int:
        """Number of steps that run while a round is in flight; ``ValueError`` until the period has been chosen."""
        if self.every is None or self.delay == "auto":
            raise ValueError("local steps without a period: choose.resolved chooses one")
        return steps_late(self.delay, self.every)

    @property
    def carrier(self) -> Method:
        flat = {"collective": "flat"} if self.codec.collective == "auto" else {}
        return replace(self.codec, fusion="single", **flat)  # type: ignore[type-var]

    def fragments(self, profile: ModelProfile) -> dict[str, int]:
        """Return, by tensor name, the fragment in which a calendar sends it; empty: the whole model is sent at once."""
        if self.schedule != "dream" or self.every is None:
            return {}
        tensors = profile.tensors[::-1]  # in the model's order
        runs = layers([t.name for t in tensors], [t.size for t in tensors], self.every)
        return {tensors[place].name: index for index, run in enumerate(runs) for place in run}


@dataclass(frozen=True)
class OneWorker(Method):
    """One worker without a network, as the planner sees it: what a user has already."""

    name: ClassVar[str] = "alone"

    def reduce(self, bucket: Bucket, state: State) -> Program:
        yield from ()


@dataclass(frozen=True)
class Accumulated(SSGD):
    """What :class:`Periodic` sends for DDP that accumulates gradients over a period."""

    name: ClassVar[str] = "accumulate"
    exact: ClassVar[bool] = False


PLAIN: Mapping[str, Method] = {"alone": OneWorker(), "accumulate:every=4": Periodic(Accumulated(), 4, 0)}
"""What everybody has without this library; a lossy method must beat both."""


def in_fragments(plan: Plan, fragments: Mapping[str, int]) -> Plan:
    def cut(bucket: PlanBucket) -> list[PlanBucket]:
        names: dict[int, list[str]] = {}
        for name in bucket.names:
            names.setdefault(fragments[name], []).append(name)
        return [replace(bucket, names=tuple(some)) for _, some in sorted(names.items())]

    return Plan(tuple(tuple(one for b in phase for one in cut(b)) for phase in plan.phases), rule=plan.rule)


@dataclass(frozen=True)
class Period:
    """A simulated period, or one step of it if its layers are sent by a calendar."""

    every: int
    seconds: float
    exposed_seconds: float
    events: tuple[Event, ...]
    bytes_sent: int


def simulate_period(
    method: Periodic,
    profile: ModelProfile,
    parts: Sequence[ProgramPart],
    buckets: Sequence[PlanBucket],
    *,
    shared: bool,
    streams: int | None,
    optimizer_seconds: float,
) -> list[Period]:
    """Simulate one period in the steady state: its round starts at the beginning and is merged ``delay`` steps later.

    With a calendar, what is sent after a step starts with the next, and is priced as merged at that one's end.
    """
    backward = sum(t.backward_seconds for t in profile.tensors)
    step = [("forward", profile.forward_seconds), ("backward", backward), ("optimizer", optimizer_seconds)]

    travelling, every = method.travelling, method.every
    assert every is not None
    fragments = method.fragments(profile)
    if not fragments:
        return [_run(step, parts, every, travelling, shared=shared, streams=streams)]
    own = [fragments[bucket.names[0]] for bucket in buckets]
    exchanges = [0] * (max(fragments.values()) + 1)
    for index, part in zip(own, parts, strict=True):
        exchanges[index] += nanoseconds(sum(part.segments) + sum(hop.seconds for hop in part.hops))
    window = nanoseconds(sum(seconds for _, seconds in step))

    def by_calendar(apart: int | None) -> list[Period]:
        leaving = calendar(exchanges, [window] * every, apart=apart)
        together = [[part for index, part in zip(own, parts) if index in some] for some in leaving]
        return [_run(step, some, 1, 1, shared=shared, streams=streams) for some in together]

    once, again = by_calendar(None), by_calendar(travelling)
    return again if sum(p.seconds for p in again) <= LONGER * sum(p.seconds for p in once) else once


def _run(
    step: Sequence[tuple[str, float]],
    parts: Sequence[ProgramPart],
    every: int,
    travelling: int,
    *,
    shared: bool,
    streams: int | None,
) -> Period:
    tasks = []
    for number in range(every + 1):
        if number == travelling:
            tasks += [ComputeTask("merge", 0.0, needs=position) for position in range(len(parts))]
        if number < every:
            tasks += [ComputeTask(f"{name} {number + 1}", seconds) for name, seconds in step]
    machine = Machine(tasks, list(parts), [], shared=shared, streams=streams)
    seconds = machine.run()
    sent = sum(event.bytes for event in machine.events)
    return Period(every, seconds, exposed_seconds(machine.events), tuple(machine.events), sent)
