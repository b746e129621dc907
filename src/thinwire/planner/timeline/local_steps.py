"""Local steps on the timeline: a period of steps that exchange nothing, and one round beside or between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.planner.periods import LONGEST
from thinwire.planner.profiles import ModelProfile
from thinwire.planner.timeline.machine import ComputeTask, Machine
from thinwire.planner.timeline.programs import ProgramPart
from thinwire.planner.timeline.result import Event, exposed_seconds
from thinwire.program import Bucket, Method, Program, State


@dataclass(frozen=True)
class Periodic(Method):
    """What the planner knows of local steps (``thinwire.Local``): a codec's program now and then, in one bucket.

    Args:
        codec: carries the weights, or their changes.
        every: steps between two rounds; None: ``planner.choose.resolved`` chooses.
        delay: steps that go on while a round travels; "full": all but one; "auto": chosen with ``every``.
        most: steps between two rounds, where ``every`` is None.
        outer: an outer optimizer makes something else of the mean change.
    """

    name: ClassVar[str] = "local"
    loss: ClassVar[str] = "apart between rounds"

    codec: Method
    every: int | None = None
    delay: int | str = "auto"
    most: int = LONGEST
    outer: bool = False

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """The codec's own."""
        yield from self.codec.reduce(bucket, state)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        """As the codec has it."""
        return self.codec.dense(name, shape, embedding)

    @property
    def overlapped(self) -> bool:
        """Whether training goes on while a round travels."""
        return self.delay != 0

    @property
    def carrier(self) -> Method:
        """The codec, with all of the model in one bucket."""
        flat = {"collective": "flat"} if self.codec.collective == "auto" else {}
        return replace(self.codec, fusion="single", **flat)  # type: ignore[type-var]


@dataclass(frozen=True)
class Period:
    """A simulated period.

    Attributes:
        every: its steps.
        seconds: of all of them.
        exposed_seconds: in which nothing is computed.
        events: of the whole period.
        bytes_sent: by this rank.
    """

    every: int
    seconds: float
    exposed_seconds: float
    events: tuple[Event, ...]
    bytes_sent: int


def simulate_period(
    method: Periodic,
    profile: ModelProfile,
    parts: Sequence[ProgramPart],
    *,
    shared: bool,
    streams: int | None,
    optimizer_seconds: float,
) -> Period:
    """One period in the steady state: its round begins with it, and is merged ``delay`` steps later.

    Args:
        method: how often, and what goes on meanwhile.
        profile: of the model.
        parts: the round's programs.
        shared, streams: as of ``Machine``.
        optimizer_seconds: of a whole update.
    """
    backward = sum(t.backward_seconds for t in profile.tensors)
    step = [("forward", profile.forward_seconds), ("backward", backward), ("optimizer", optimizer_seconds)]

    every, delay = method.every, method.delay
    if every is None or delay == "auto":
        raise ValueError("local steps without a period: planner.choose.resolved chooses one")
    tasks = []
    travelling = every - 1 if isinstance(delay, str) else min(delay, every - 1)
    for number in range(every + 1):
        if number == travelling:
            tasks += [ComputeTask("merge", 0.0, needs=position) for position in range(len(parts))]
        if number < every:
            tasks += [ComputeTask(f"{name} {number + 1}", seconds) for name, seconds in step]
    machine = Machine(tasks, list(parts), [], shared=shared, streams=streams)
    seconds = machine.run()
    sent = sum(event.bytes for event in machine.events)
    return Period(every, seconds, exposed_seconds(machine.events), tuple(machine.events), sent)
