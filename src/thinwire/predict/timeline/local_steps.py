"""Local steps on the timeline: a period of steps without exchange, and one round beside or between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.periods import LONGEST, own_steps, steps_late
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Bucket, Method, Program, State
from thinwire.predict.timeline.machine import ComputeTask, Machine
from thinwire.predict.timeline.programs import ProgramPart
from thinwire.predict.timeline.result import Event, exposed_seconds


@dataclass(frozen=True)
class Periodic(Method):
    """Local steps (``thinwire.Local``) as the planner sees them: a codec's program every few steps, in one bucket.

    ``every`` None: ``choose.resolved`` chooses, up to ``most``. ``delay``: steps that run while a round is in flight;
    "full": all but one; "auto": chosen with ``every``. ``look``: beta of a look-ahead, which takes no time.
    ``codec`` None: chosen too, as ``attach`` does.
    """

    name: ClassVar[str] = "local"
    loss: ClassVar[str] = "apart between rounds"

    codec: Method | None
    every: int | None = None
    delay: int | str = "auto"
    most: int = LONGEST
    outer: bool = False
    look: float = 0.0

    @property
    def code(self) -> Method:
        """The codec; ``ValueError`` until it has been chosen."""
        if self.codec is None:
            raise ValueError("local steps without a codec: choose.resolved chooses one")
        return self.codec

    def reduce(self, bucket: Bucket, state: State) -> Program:
        yield from self.code.reduce(bucket, state)

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        return self.code.dense(name, shape, embedding)

    @property
    def travelling(self) -> int:
        """Number of steps that run while a round is in flight; ``ValueError`` until the period has been chosen."""
        if self.every is None or self.delay == "auto":
            raise ValueError("local steps without a period: choose.resolved chooses one")
        return steps_late(self.delay, self.every)

    @property
    def carrier(self) -> Method:
        flat = {"collective": "flat"} if self.code.collective == "auto" else {}
        return replace(self.code, fusion="single", **flat)  # type: ignore[type-var]


@dataclass(frozen=True)
class OwnPace(Periodic):
    """Local steps with ``pace="own"`` and a period; a step is the fastest machine's.

    ``speeds``: of all workers, relative to the fastest.
    """

    speeds: tuple[float, ...] = (1.0,)

    @property
    def made(self) -> list[int]:
        """Steps of each worker in a period."""
        return [own_steps(self.every or 1, speed) for speed in self.speeds]

    @property
    def stretch(self) -> float:
        """How many times as long as the fastest machine's steps a period takes: more than 1 where one has too many."""
        return max(made / speed for made, speed in zip(self.made, self.speeds)) / (self.every or 1)


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


def is_plain(method: Method) -> bool:
    """Return whether a method is one worker alone, or DDP that accumulates."""
    return isinstance(method, OneWorker) or (isinstance(method, Periodic) and isinstance(method.codec, Accumulated))


@dataclass(frozen=True)
class Period:
    """A simulated period."""

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
    """Simulate one period in the steady state: its round starts at once, and is merged ``delay`` steps later."""
    backward = sum(t.backward_seconds for t in profile.tensors)
    step = [("forward", profile.forward_seconds), ("backward", backward), ("optimizer", optimizer_seconds)]
    travelling, every, tasks = method.travelling, method.every, list[ComputeTask]()
    assert every is not None
    for number in range(every + 1):
        if number == travelling:
            tasks += [ComputeTask("merge", 0.0, needs=position) for position in range(len(parts))]
        if number < every:
            tasks += [ComputeTask(f"{name} {number + 1}", seconds) for name, seconds in step]
    machine = Machine(tasks, list(parts), [], shared=shared, streams=streams)
    seconds = machine.run()
    sent = sum(event.bytes for event in machine.events)
    return Period(every, seconds, exposed_seconds(machine.events), tuple(machine.events), sent)
