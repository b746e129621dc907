"""The buckets of the current plan: which parameters each contains, when its program starts, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.program import Method, Plan, PlanBucket, Program
from thinwire.core.program.trace import TracedExchange, with_rare_rounds
from thinwire.engine.controller.planning import trace_plan
from thinwire.engine.memory import Memory
from thinwire.engine.parameters import Managed
from thinwire.engine.session import Session
from thinwire.engine.stats import BucketStats


class Parameters:
    """The managed parameters, by index, by name and by ``id``."""

    def __init__(self, managed: Sequence[Managed]) -> None:
        self.manage(managed)

    def manage(self, managed: Sequence[Managed]) -> None:
        """Replace the list, for example by what another method compresses."""
        self.managed = list(managed)
        self.by_name = {m.name: m for m in managed}
        self.names = {id(m.parameter): m.name for m in managed}
        self.nbytes = sum(m.parameter.nbytes for m in managed)


@dataclass(eq=False, slots=True)
class Step:
    """A backward in progress.

    Attributes:
        phase: the plan's phase. entries: the phase's buckets.
        where: the bucket of each parameter.
        left: how many gradients each bucket still waits for.
        seen: for each parameter, whether its gradient has arrived. arrival: parameter indices in order of arrival.
        began: when its first gradient arrived, in seconds of ``time.perf_counter``.
        told: whether the caller has said which parameters are used.
    """

    phase: int
    entries: Sequence[PlanBucket]
    where: Sequence[int]
    left: list[int]
    seen: list[bool]
    arrival: list[int]
    began: float
    told: bool


class Buckets:
    """The buckets of one attached model.

    Args:
        session: the session whose method runs.
        parameters: the model's.
        plan: the first plan.
        views: whether ``.grad`` may be the buckets' memory.
        pauses: whether programs stop at their ``NextForward``: the schedule is decoupled.
    """

    def __init__(self, session: Session, parameters: Parameters, plan: Plan, *, views: bool, pauses: bool) -> None:
        self.session, self.parameters, self.plan = session, parameters, plan
        self.views, self.pauses = views, pauses
        self.inline = False  # whether programs with one exchange run in the thread of backward
        self.step: Step | None = None
        self._traced: list[list[list[TracedExchange]]] = []
        self._starting = self._traced
        self._where: list[list[int]] = []
        self._memory: dict[tuple[int, int], Memory] = {}

    def adopt(self, plan: Plan) -> None:
        """Put a plan in force; every rank does this at the same step."""
        session, managed = self.session, self.parameters.managed
        state, comm = session.state, session.comm
        assert comm is not None
        self.plan = plan
        self._traced = trace_plan(plan, session.method, session.dense, managed, state.topology, state.rank)
        comm.open_lanes(program for phase in self._traced for program in with_rare_rounds(session.method, phase))
        if state.step < state.start:
            self._starting = trace_plan(plan, session.first, session.dense, managed, state.topology, state.rank)
            comm.open_lanes(bucket for phase in self._starting for bucket in phase)
        self._where = []
        for phase in plan.phases:
            where = [0] * len(managed)
            for b, entry in enumerate(phase):
                for name in entry.names:
                    where[self.parameters.by_name[name].index] = b
            self._where.append(where)
        self._memory = {}

    def begin(self, expected: frozenset[int] | None, began: float) -> Step:
        """Open a step. ``expected``: indices of the parameters that can receive gradients; None: all."""
        session, by_name = self.session, self.parameters.by_name
        before = session.starting
        session.begin()
        if session.starting != before:
            self._memory.clear()  # it belongs to the other method
        phase = session.state.turn % len(self.plan.phases)
        entries = self.plan.phases[phase]
        left = [sum(expected is None or by_name[name].index in expected for name in entry.names) for entry in entries]
        count = len(self.parameters.managed)
        self.step = Step(phase, entries, self._where[phase], left, [False] * count, [], began, expected is not None)
        return self.step

    def ready(self, index: int) -> None:
        """Start the program of a bucket that waits for no more gradients."""
        step, comm = self.step, self.session.comm
        assert step is not None
        assert comm is not None
        # A program with one exchange in backward needs no thread to issue a second one.
        cheap = self.method_of(index).cheap_pack
        traced = self._starting if self.session.starting else self._traced
        once = self.pauses or len(traced[step.phase][index]) <= 1
        started = comm.steps.executor.ready(index, inline=once and (cheap or self.inline))
        if started and cheap and once and self.views and (memory := self.memory(index)).filled:
            memory.hand_over(shown=not self.pauses)

    def program(self, index: int) -> Program:
        """Return the program of a bucket whose gradients are there; called by the executor."""
        step, method = self.step, self.method_of(index)
        assert step is not None
        key = (step.phase, index)
        if key not in self._memory:
            entry = step.entries[index]
            parameters = [self.parameters.by_name[name].parameter for name in entry.names]
            ranks = self.session.state.size if self.pauses else 1
            self._memory[key] = Memory(entry, parameters, cheap_pack=method.cheap_pack, ranks=ranks)
        return method.reduce(self._memory[key].bucket(index, self.session.loss_scale.now), self.session.state)

    def memory(self, index: int) -> Memory:
        """Return the memory of a bucket of this step, once its program has begun."""
        assert self.step is not None
        return self._memory[self.step.phase, index]

    def method_of(self, index: int) -> Method:
        """Return the method that runs for a bucket in this step."""
        assert self.step is not None
        entry = self.step.entries[index]
        return entry.applied(self.session.method_of(entry.dense))

    def stats(self) -> list[BucketStats]:
        """Return the statistics of the buckets of the next phase."""
        phase = self.session.state.turn % len(self.plan.phases)
        by_name = self.parameters.by_name
        return [
            BucketStats(
                entry.names,
                sum(by_name[name].parameter.numel() for name in entry.names),
                entry.dense,
                sum(step.sent_bytes for step in traced),
            )
            for entry, traced in zip(self.plan.phases[phase], self._traced[phase])
        ]
