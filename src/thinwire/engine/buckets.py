"""The buckets of the current plan: which parameters each contains, when its program starts, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.core.program import Bucket, Method, Plan, PlanBucket, Program, Slot
from thinwire.core.program.trace import TracedExchange, with_rare_rounds
from thinwire.engine.controller.planning import trace_plan
from thinwire.engine.executors.streams import read_here
from thinwire.engine.parameters import ManagedParameter, gradient_dtype
from thinwire.engine.session import Session
from thinwire.engine.stats import BucketStats


@dataclass(frozen=True, eq=False, slots=True)
class _Phase:
    """A phase of the plan: its buckets, their methods and exchanges, and the bucket of each parameter."""

    number: int
    entries: Sequence[PlanBucket]
    methods: list[Method]
    traced: list[list[TracedExchange]]
    where: list[int]


@dataclass(eq=False, slots=True)
class Step:
    """A backward in progress."""

    entries: Sequence[PlanBucket]
    where: Sequence[int]  # the bucket of each parameter
    left: list[int]  # how many gradients each bucket still waits for
    seen: list[bool]  # for each parameter, whether its gradient has arrived
    arrival: list[int]  # parameter indices, in order
    began: float  # when the first gradient arrived, by ``time.perf_counter``
    told: bool  # the caller has said which parameters are used


class Buckets:
    """The buckets of one attached model. ``views``: ``.grad`` may be their memory; ``pauses``: it is decoupled."""

    step: Step  # the backward in progress, or the last
    _phase: _Phase

    def __init__(
        self, session: Session, managed: Sequence[ManagedParameter], plan: Plan, *, views: bool, pauses: bool
    ) -> None:
        self.session, self.plan, self.views, self.pauses = session, plan, views, pauses
        self.manage(managed)
        self.inline = False  # programs with one exchange run in the thread of backward
        self._phases: list[_Phase] = []
        self._first: list[_Phase] = []  # of the method that runs before the other begins
        self._memory: dict[tuple[int, int], Memory] = {}

    def manage(self, managed: Sequence[ManagedParameter]) -> None:
        """Replace the parameters, for example by what another method compresses; adopt a plan afterwards."""
        self.managed = list(managed)
        self.by_name = {m.name: m for m in managed}
        self.names = self.session.watch.names = {id(m.parameter): m.name for m in managed}
        self.nbytes = sum(m.parameter.nbytes for m in managed)

    def adopt(self, plan: Plan) -> None:
        """Put a plan in force; every rank does this at the same step."""
        session = self.session
        self.plan, self._memory = plan, {}
        self._phases = self._traced(plan, session.method)
        opened = [with_rare_rounds(session.method, phase.traced) for phase in self._phases]
        self._first = []
        if session.state.step < session.state.start:
            self._first = self._traced(plan, session.first)
            opened += [phase.traced for phase in self._first]
        session.comm.open_lanes(program for programs in opened for program in programs)

    def _traced(self, plan: Plan, method: Method) -> list[_Phase]:
        dense, state = self.session.dense, self.session.state
        traced, phases = trace_plan(plan, method, dense, self.managed, state.topology, state.rank), []
        for number, entries in enumerate(plan.phases):
            where = [0] * len(self.managed)
            for b, entry in enumerate(entries):
                for name in entry.names:
                    where[self.by_name[name].index] = b
            methods = [entry.applied(dense if entry.dense else method) for entry in entries]
            phases.append(_Phase(number, entries, methods, traced[number], where))
        return phases

    def begin(self, expected: frozenset[int] | None, began: float) -> Step:
        """Open a step. ``expected``: indices of the parameters that can receive gradients; None: all."""
        session, by_name, before = self.session, self.by_name, self.session.starting
        session.begin()
        if session.starting != before:
            self._memory.clear()  # it belongs to the other method
        if session.starting and not self._first:  # an early state was loaded late
            self._first = self._traced(self.plan, session.first)
        phases = self._first if session.starting else self._phases
        self._phase = phase = phases[session.state.turn % len(phases)]
        left = [
            sum(expected is None or by_name[name].index in expected for name in entry.names) for entry in phase.entries
        ]
        seen = [False] * len(self.managed)
        self.step = Step(phase.entries, phase.where, left, seen, [], began, expected is not None)
        session.open([entry.names for entry in phase.entries], self.program, pause=self.pauses)
        return self.step

    def ready(self, index: int) -> None:
        # A program with one exchange in backward needs no thread to issue a second one.
        cheap = self._phase.methods[index].cheap_pack
        once = self.pauses or len(self._phase.traced[index]) <= 1
        started = self.session.comm.executor.ready(index, inline=once and (cheap or self.inline))
        if started and cheap and once and self.views and (memory := self.memory(index)).filled:
            memory.hand_over(shown=not self.pauses)

    def program(self, index: int) -> Program:
        key, method = (self._phase.number, index), self._phase.methods[index]
        if key not in self._memory:
            entry = self._phase.entries[index]
            parameters = [self.by_name[name].parameter for name in entry.names]
            ranks = self.session.state.size if self.pauses else 1
            self._memory[key] = Memory(entry, parameters, cheap_pack=method.cheap_pack, ranks=ranks)
        return method.reduce(self._memory[key].bucket(index, self.session.scale), self.session.state)

    def memory(self, index: int) -> Memory:
        return self._memory[self._phase.number, index]

    def method_of(self, index: int) -> Method:
        return self._phase.methods[index]

    def stats(self) -> list[BucketStats]:
        phase = self._phases[self.session.state.turn % len(self._phases)]
        return [
            BucketStats(
                entry.names,
                sum(self.by_name[name].parameter.numel() for name in entry.names),
                entry.dense,
                sum(step.sent_bytes for step in traced),
            )
            for entry, traced in zip(phase.entries, phase.traced)
        ]


class Memory:
    """A bucket's slots and, for a method with ``cheap_pack``, one buffer with a view for each parameter."""

    def __init__(self, entry: PlanBucket, parameters: list[nn.Parameter], *, cheap_pack: bool, ranks: int = 1) -> None:
        self.parameters, self.kept = parameters, entry.kept
        self.slots = [Slot(n, p.shape, None, gradient_dtype(p), p.device, p) for n, p in zip(entry.names, parameters)]
        self.buffer: Tensor | None = None
        self.views: list[Tensor] | None = None
        self.gradients: list[Tensor] = []  # the views that become ``.grad``, with version counters of their own
        self.used = [False] * len(parameters)  # which had a gradient on this rank in the last step
        self.handed_over = False  # ``.grad`` of all is already a view in ``gradients``
        self.made: Bucket | None = None
        if cheap_pack:
            first, sizes = self.slots[0], [s.numel for s in self.slots]
            room = -(-sum(sizes) // ranks) * ranks  # for the padding of shards
            self.buffer = torch.empty(room, dtype=first.dtype, device=first.device)
            pieces = self.buffer[: sum(sizes)].split(sizes)
            self.views = [piece.as_strided(p.shape, strides_of(p)) for p, piece in zip(parameters, pieces)]
            self.gradients = [view.data for view in self.views]

    def bucket(self, index: int, scale: Tensor | None) -> Bucket:
        for slot, parameter in zip(self.slots, self.parameters):
            grad = parameter.grad if parameter.requires_grad else None  # frozen since: an old gradient does not count
            slot.value = grad.detach() if grad is not None and grad.requires_grad else grad
            slot.result = None
            if grad is not None and grad.is_cuda:  # the program runs on a side stream
                read_here(grad)
        self.used = [slot.value is not None for slot in self.slots]
        self.handed_over = False
        if self.made is None:
            self.made = Bucket(index, self.slots, buffer=self.buffer, kept=self.kept, views=self.views)
        self.made.renew(scale)
        return self.made

    @property
    def filled(self) -> bool:
        return self.made is not None and self.made.filled

    def hand_over(self, *, shown: bool) -> None:
        """Make ``.grad`` the bucket's memory, so that autograd can reuse what it allocated.

        Kept to the end of backward, that would be faulted in again each step (5 %). Unless ``shown``, it comes later.
        """
        self.handed_over = True
        for slot, parameter, grad in zip(self.slots, self.parameters, self.gradients):
            if slot.value is None:  # unused here: gets its average at the end, if another rank uses it
                self.handed_over = False
            else:
                slot.value = slot.result
                parameter.grad = grad if shown else None


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a parameter's gradient: the parameter's, if these leave no gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def delivered(parameter: Tensor, result: Tensor, value: Tensor | None, *, copy: bool) -> Tensor:
    """Return an average as a ``.grad``: autograd's strides, its own version counter. ``value`` may be overwritten."""
    if not copy and result.stride() == strides_of(parameter):
        return result.data
    own = torch.empty_like(parameter, dtype=result.dtype) if value is None else value
    return own.detach().copy_(result)


def prime_allocator() -> None:
    """Make glibc, which learns from the largest block freed, keep memory that a step frees: else 10 MB fault in."""
    torch.empty(31 << 20, dtype=torch.uint8)
