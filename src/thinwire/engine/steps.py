"""Ties hooks, buckets, programs and state of an attached model together, step by step."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.engine.alone import Alone
from thinwire.engine.backward_end import BackwardEnd
from thinwire.engine.buffers import Buffers
from thinwire.engine.channel import Channel
from thinwire.engine.communicator import Communicator
from thinwire.engine.companion import Companion
from thinwire.engine.deferred import Deferred
from thinwire.engine.delivered import Delivered
from thinwire.engine.hooks import ModuleHook
from thinwire.engine.late_parameters import LateParameters
from thinwire.engine.memory import Memory, delivered, teach_malloc
from thinwire.engine.parameters import Managed, managed_parameters
from thinwire.engine.pilot import Decision, Pilot
from thinwire.engine.planning import make_plan, trace_plan
from thinwire.engine.recorder import Recorder
from thinwire.engine.restart import tell_reset
from thinwire.engine.scaler import found_scaler, loss_scale
from thinwire.engine.second_plan import second_plan
from thinwire.engine.settings import Settings
from thinwire.engine.shards import Shards
from thinwire.engine.step_watch import StepWatch
from thinwire.engine.streams import StreamExecutor
from thinwire.kernels.upload import upload
from thinwire.methods.decoupling import deferring
from thinwire.program import Bucket, Method, Plan, Program, State, Topology
from thinwire.program.bucket import Slot, used_by_nobody
from thinwire.program.trace import with_rare_rounds

logger = logging.getLogger("thinwire")

_attached: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def attached_to(model: nn.Module) -> Any:
    """The GradientSync of a model, or None. A copy of the model has none."""
    return _attached.get(id(model))


class Steps:
    """The machinery of :class:`~thinwire.engine.sync.GradientSync`, which adds what users call."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        dense: Method,
        managed: list[Managed],
        communicator: Communicator | Alone | None,
        topology: Topology,
        scaler: Any,
        settings: Settings,
        pilot: Pilot | None = None,
    ) -> None:
        self.model, self._pilot = model, pilot
        self.method = method
        self._dense = dense
        self._managed = managed
        self._by_name = {m.name: m for m in managed}
        self._names = {id(m.parameter): m.name for m in managed}
        self._comm = communicator
        self.scaler = scaler
        self.optimizers = tuple(optimizers)
        self.companions: dict[str, Companion] = {}  # what is saved and loaded with this, by name
        self._channels: list[Channel] = []
        self._settings = settings
        self.topology = topology
        self.rank = communicator.rank if communicator else 0
        self.state = State(self.rank, topology)
        self._exact = False  # the method has not begun
        self._enabled = True
        self._owed = False  # gradients of a no_sync pass wait to be reduced
        self._handles: list[Any] = []
        self._rejected, self._exposed, self._dense_bytes = 0, 0.0, 0
        self._rebuilt = settings.pinned is not None
        self._began = 0.0  # the last backward, with its first gradient
        self._decision: Decision | None = None  # of the pilot, not followed yet
        self._expected: frozenset[int] | None = None  # by index: what the next backward can reach; None: anything
        self._broken: str | None = None
        self._recorder: Recorder | None = None
        self._marks: dict[str, float] = {}
        self.why: tuple[str, ...] = ()  # the pilot's reasons for the plan in force
        self._running = False
        self._deferred: Deferred | None = None
        self._inline = False  # programs of one exchange run in the thread of backward
        self._made_here: Callable[[int], None] | None = None  # a bucket: notes the stream of one of its gradients
        self._delivered = Delivered()
        self._late = LateParameters(model)
        self._watch = StepWatch(
            lambda: self.state, lambda: self._names, expected=bool(optimizers), before=self._before_step
        )
        self._buffers_of_model: Buffers | None = None
        self._told_unused = False
        self._hands_over = settings.gradient_as_bucket_view
        self._end = BackwardEnd(self._finish)
        order = [m.index for m in reversed(managed)]
        backend = communicator.backend if communicator else "none"
        first = settings.pinned or make_plan(method, managed, order, (), backend)
        first.check(m.name for m in managed)
        if communicator:
            communicator.watch_order = settings.check_order
            communicator.agree(self._facts(first))
            self._inline = communicator.backend == "gloo" and not communicator.spare_cores()
            communicator.broadcast([*model.parameters(), *model.buffers()])
            if settings.broadcast_buffers and isinstance(communicator, Communicator):
                self._buffers_of_model = Buffers(model, communicator)
            self._adopt(first)
            communicator.start()
            if isinstance(communicator.executor, StreamExecutor):
                self._made_here = communicator.executor.arrived
            if communicator.device.type == "cpu":
                teach_malloc()
            if (options := deferring(method)) is not None:
                self._deferred = Deferred(model, managed, optimizers, communicator, self.state, options, self._fail)
            self._install()
        else:
            self.plan = first
        _attached[id(model)] = self

    # --- set-up -------------------------------------------------------------------------------------------------

    def _facts(self, plan: Plan) -> dict[str, Any]:
        kinds = {m.name: m.description for m in self._managed}
        options = {key: str(value) for key, value in self.method.options().items()}
        return {
            "method": self.method.name,
            "options": options,
            "parameters": kinds,
            "parameters in order": list(kinds),
            "frozen": [f"{n} {list(p.shape)}" for n, p in self.model.named_parameters() if not p.requires_grad],
            "buffers": [f"{n} {list(b.shape)}" for n, b in self.model.named_buffers()],
            "topology": list(self.topology.layout),
            "start_compression_step": self._start,
            "find_unused_parameters": self._settings.find_unused_parameters,
            "broadcast_buffers": self._settings.broadcast_buffers,
            "plan": plan.hash,
        }

    def _adopt(self, plan: Plan) -> None:
        """Put a plan in force; every rank does so at the same step."""
        assert self._comm is not None
        self.plan = plan
        traced = trace_plan(plan, self.method, self._dense, self._managed, self.topology, self.rank)
        self._comm.open_lanes(program for phase in traced for program in with_rare_rounds(self.method, phase))
        if self.state.step < self._start:
            exact = trace_plan(plan, self._dense, self._dense, self._managed, self.topology, self.rank)
            self._comm.open_lanes(bucket for phase in exact for bucket in phase)
        self._traced = traced
        self._where: list[list[int]] = []
        for phase in plan.phases:
            where = [0] * len(self._managed)
            for b, entry in enumerate(phase):
                for name in entry.names:
                    where[self._by_name[name].index] = b
            self._where.append(where)
        self._memory: dict[tuple[int, int], Memory] = {}

    @property
    def _start(self) -> int:
        """The first step at which the method runs."""
        asked = self._settings.start_compression_step
        return self.method.exact_start if asked is None else asked

    def _install(self) -> None:
        for m in self._managed:
            self._handles.append(m.parameter.register_post_accumulate_grad_hook(partial(self._arrive, m.index)))
        readers: set[nn.Module] = set()
        if self._deferred is not None:
            readers = set(self._deferred.readers)
            self._update_before = self._deferred.before_forward
            self._update_before_untraced = torch.compiler.disable(self._update_before)
        for module in self.model.modules():
            if module in readers:
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._reader_hook), prepend=True))
            elif module is self.model or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._forward_hook)))

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _reader_hook(self, module: nn.Module, args: Any) -> None:
        """Of a module whose parameters may wait for their update; one hook, since each costs more than its work."""
        compiling = torch.compiler.is_compiling()  # the model was compiled after ``attach``
        (self._update_before_untraced if compiling else self._update_before)(module)
        self._forward_began(module, compiling)

    def _forward_hook(self, module: nn.Module, args: Any) -> None:
        self._forward_began(module, torch.compiler.is_compiling())

    def _forward_began(self, module: nn.Module, compiling: bool) -> None:
        timed = self._pilot is not None and module is self.model
        if (compiling and not timed) or not self._enabled:  # no break in the graph for each module
            return
        if not self._end.outside():
            self._end.note()  # a forward re-run inside backward belongs to the outer pass
        elif self._running:
            self._fail("an earlier backward ended with an exception in the middle of the exchange")
        if self._pilot is not None and timed and not self._running:
            self._pilot.timings.forward()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step."""
        if self._comm is None:
            return
        ours = self._late.check(optimizer, self._names)
        if ours and self._running:
            raise RuntimeError(
                "optimizer.step() in the middle of the exchange: .grad holds the averages when backward() has ended, "
                "so step() cannot be called from a hook inside it (nor after a backward that ended with an exception)"
            )
        if not ours or not self.method.has_residual:
            return
        held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names)
        self._delivered.forget(self._by_name[self._names[id(p)]].index for p in held)
        if self.scaler is None:
            self.scaler = found_scaler(self.state, self._comm.device)

    def _arrive(self, index: int, parameter: Tensor) -> None:
        if not self._enabled:
            self._owed = True
            if (grad := parameter.grad) is not None and self._delivered.added_to(index, grad):
                self._delivered.note(index, grad)  # as it is now: the next exchange would send the average again
            return
        if not self._running:
            self._begin()
        self._end.note()
        if self._seen[index]:
            raise RuntimeError(
                f"{self._managed[index].name} received a gradient twice in one backward, after its exchange had begun; "
                "use torch.utils.checkpoint with use_reentrant=False, or share the module less"
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"{self._managed[index].name} received a sparse gradient, which thinwire does not exchange: use "
                "sparse=False"
            )
        if self._delivered.added_to(index, parameter.grad):
            raise RuntimeError(
                "a second backward on top of averaged gradients: wrap all but the last in `with sync.no_sync():`, "
                "or call optimizer.step() and zero_grad() in between"
            )
        if self._expected is not None and index not in self._expected:
            raise RuntimeError(f"{self._managed[index].name} received a gradient, but expect() did not name it")
        self._seen[index] = True
        self._arrival.append(index)
        if self._pilot is not None:
            self._pilot.timings.arrived(index)
        bucket = self._current[index]
        if self._made_here is not None:
            self._made_here(bucket)
        self._left[bucket] -= 1
        if self._left[bucket] == 0:
            self._ready(bucket)

    def _ready(self, bucket: int) -> None:
        assert self._comm is not None
        light, once = self._method_of(bucket).light, self._once(bucket)
        self._comm.executor.ready(bucket, light=once and (light or self._inline))
        if light and once and self._hands_over and (made := self._buckets[bucket]) is not None and made.filled:
            self._hand_over(made)

    def _once(self, bucket: int) -> bool:
        """Whether a bucket's program has one exchange in backward, so that nobody need see to a second."""
        return self._deferred is not None or len(self._traced[self._phase][bucket]) <= 1

    def _hand_over(self, bucket: Bucket) -> None:
        """Let ``.grad`` be the bucket's memory from now on: what autograd allocated serves the gradients to come.

        Kept to the end of backward, it would be given back to the system and faulted in again at every step (5 %). On
        the decoupled schedule there is nothing to show for it yet.
        """
        memory = self._memory[self._phase, bucket.index]
        memory.handed_over = True
        deferred = self._deferred is not None
        for slot, parameter, grad in zip(memory.slots, memory.parameters, memory.gradients):
            if slot.value is None:  # unused here: gets its average at the end, if it is used elsewhere
                memory.handed_over = False
            else:
                slot.value = slot.result
                parameter.grad = None if deferred else grad

    # --- one step ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._broken:
            raise RuntimeError(f"this GradientSync is unusable after an earlier failure: {self._broken}")
        assert self._comm is not None
        self._check_dtypes()
        self._watch.begin()
        if self._decision is not None:  # nothing is pending any more
            self._follow(self._decision)
        tell_reset(self.method, self.state)
        phase = self.state.turn % len(self.plan.phases)
        exact, self.state.start = self.state.step < self._start, self._start
        if exact != self._exact:
            self._exact = exact
            self._memory.clear()  # it is the other method's
        self._running = True
        self._began = time.perf_counter()
        self._phase = phase
        self._entries = self.plan.phases[phase]
        self._current = self._where[phase]
        expected = self._expected
        self._left = [
            sum(expected is None or self._by_name[name].index in expected for name in entry.names)
            for entry in self._entries
        ]
        self._seen = [False] * len(self._managed)
        self._arrival: list[int] = []
        self._buckets: list[Bucket | None] = [None] * len(self._entries)
        self._scale = loss_scale(self.scaler, self._comm.device)
        self.state.lr = None
        if self._deferred is not None:
            self._deferred.begin()
        names = [entry.names for entry in self._entries]
        self._comm.begin(self.state.step, names, self._program, pause=self._deferred is not None)
        if self._buffers_of_model is not None:
            self._buffers_of_model.send()
        for index, left in enumerate(self._left):
            if not left:  # nothing of it is expected: what earlier passes left there is all
                self._ready(index)

    def _program(self, index: int) -> Program:
        """The program of a bucket whose gradients are there; called by the executor."""
        method, key = self._method_of(index), (self._phase, index)
        if key not in self._memory:
            entry = self._entries[index]
            parameters = [self._by_name[name].parameter for name in entry.names]
            ranks = self.topology.world_size if self._deferred else 1
            self._memory[key] = Memory(entry, parameters, light=method.light, ranks=ranks)
        bucket = self._memory[key].bucket(index, self._scale)
        self._buckets[index] = bucket
        return method.reduce(bucket, self.state)

    def _method_of(self, bucket: int) -> Method:
        entry = self._entries[bucket]
        return entry.applied(self._dense if entry.dense or self._exact else self.method)

    def _finish(self) -> None:
        """End of backward: launch what is left, wait, commit, deliver."""
        if not self._running:
            return
        assert self._comm is not None
        for bucket, left in enumerate(self._left):
            if left:
                self._ready(bucket)
        if self._recorder is not None and "backward" in self._marks:
            self._recorder.add("backward", "compute", self._marks.pop("backward"))
        started = time.perf_counter()
        failure = self._comm.finish()
        self._exposed += time.perf_counter() - started
        if failure:
            self._fail(failure)
        if self._settings.check_order:
            self._comm.check_order()
        if self._buffers_of_model is not None:
            self._buffers_of_model.receive()
        if self._deferred is not None:
            self._defer()
        else:
            used = self._used_anywhere() if self._settings.find_unused_parameters else None
            self._commit()
            self._deliver(used)
        self._watch.delivered()
        self._running = self._owed = False
        self._expected = None
        self._dense_bytes += self._dense_bytes_per_step()
        if self._pilot is not None:
            self._pilot.timings.ended()
        if not self._rebuilt:
            self._rebuild(started - self._began)
        elif self._pilot is not None and (decision := self._pilot.after_step(self.method, self._dense)) is not None:
            if self._deferred is None:
                self._follow(decision)
            else:  # the updates of this step are still to come: before the next backward
                self._decision = decision

    def _follow(self, decision: Decision) -> None:
        """Take over a decision of the pilot, between two steps, on all ranks alike."""
        self._decision = None
        if decision.method is not None:
            self.method = decision.method
            self._managed = managed_parameters(self.model, self.method, self._settings.dense)
            self._by_name = {m.name: m for m in self._managed}
            self._names = {id(m.parameter): m.name for m in self._managed}
        self.why = decision.why
        self._adopt(decision.plan)

    def _fail(self, text: str) -> NoReturn:
        self._broken = text
        self._running = False
        self.state.drop_step()
        raise RuntimeError(text)

    def _commit(self) -> None:
        assert self._comm is not None
        if self._comm.device.type == "cuda":
            self.state.end_step_on_device(hold=self._watch.hold)
        elif not self.state.end_step(hold=self._watch.hold):
            self._rejected += 1

    def _used_anywhere(self) -> list[bool]:
        assert self._comm is not None
        mine = bytes(m.parameter.grad is not None for m in self._managed)
        if self._comm.device.type == "cuda":  # as many on all ranks: one exchange, of which the host reads once
            flags = upload(torch.tensor(list(mine), dtype=torch.uint8), self._comm.device)
            return [bool(x) for x in self._comm.gather_tensor(flags).amax(0).tolist()]
        everyone = self._comm.gather(mine)
        return [any(row[i] for row in everyone) for i in range(len(mine))]

    def _deliver(self, used: list[bool] | None) -> None:
        """Put the averages into ``.grad``, but of parameters that are frozen, or that no rank has used."""
        self._delivered.renew()
        watched = self.method.has_residual
        unused = self._unused_anywhere() if used is None else {m.name for m in self._managed if not used[m.index]}
        for index, bucket in enumerate(self._buckets):
            assert bucket is not None
            memory = self._memory[self._phase, index]
            if memory.handed_over and used is None and not watched:
                continue
            for place, (slot, parameter) in enumerate(zip(memory.slots, memory.parameters)):
                m = self._by_name[slot.name]
                result, value = slot.result, slot.value
                slot.value = slot.result = None  # the gradients' memory is not ours to keep
                if not parameter.requires_grad:
                    continue
                if not memory.used[place] and slot.name in unused:
                    parameter.grad = None
                elif result is not None:
                    grad = parameter.grad
                    if grad is None or grad.data_ptr() != result.data_ptr() or grad.stride() != result.stride():
                        reused = memory.buffer is not None and not self._hands_over
                        parameter.grad = delivered(parameter, result, value, copy=reused)
                if watched and (grad := parameter.grad) is not None:
                    self._delivered.note(m.index, grad)
        self._buckets = []

    def _unused_anywhere(self) -> set[str]:
        """Of the parameters that this rank has not used, those that none has, as far as their sums can tell."""
        asked: dict[str, Slot] = {}
        for index in range(len(self._buckets)):
            memory, method = self._memory[self._phase, index], self._method_of(index)
            if all(memory.used):
                continue
            for slot, parameter, here in zip(memory.slots, memory.parameters, memory.used):
                if here or not parameter.requires_grad:
                    continue
                if method.sums(slot.shape):
                    asked[slot.name] = slot
                else:
                    self._tell_unused(slot.name, method)
        return used_by_nobody(asked)

    def _tell_unused(self, name: str, method: Method) -> None:
        if not self._told_unused:
            self._told_unused = True
            logger.warning(
                "thinwire: %s had no gradient on rank %d, which %s counts as zero: if no rank uses it, weight decay "
                "and momentum go on moving it. attach(..., find_unused_parameters=True) leaves .grad at None there, "
                "for one small exchange more per step", name, self.rank, method.name,
            )  # fmt: skip

    def _check_dtypes(self) -> None:
        for m in self._managed:
            if m.parameter.dtype is not m.dtype or m.parameter.device != m.device:
                raise RuntimeError(
                    f"{m.name} is {m.parameter.dtype} on {m.parameter.device} now, but was {m.dtype} on {m.device} "
                    "when the model was attached: close() it, change the model, and attach again"
                )

    def _defer(self) -> None:
        """Leave the rest of the step to ``optimizer.step()`` and the next forward."""
        assert self._deferred is not None
        assert self._comm is not None
        buckets = [bucket for bucket in self._buckets if bucket is not None]
        where = [(0, 0)] * len(self._managed)
        for b, entry in enumerate(self._entries):
            for place, name in enumerate(entry.names):
                where[self._by_name[name].index] = b, place
        light = [b for b in range(len(buckets)) if self._method_of(b).light or self._inline]
        memories = [self._memory[self._phase, b] for b in range(len(buckets))]
        sums = [self._method_of(b).sums for b in range(len(buckets))]
        shards = Shards(buckets, memories, self._comm.executor.paused, light, where, sums)
        started = time.perf_counter()
        finite = self._deferred.take(shards, exact=self._settings.find_unused_parameters)
        self._exposed += time.perf_counter() - started
        if finite is not None and self.method.has_residual:
            self.state.verdict(finite())
        self._commit()
        self._buckets = []

    def _dense_bytes_per_step(self) -> int:
        size = sum(m.parameter.numel() * m.parameter.element_size() for m in self._managed)
        world = self.topology.world_size
        return round(2 * (world - 1) * size / world)

    def _rebuild(self, backward_seconds: float) -> None:
        """Once: the plan in rank 0's order of arrival; decoupled: the reverse of the order in which layers need it."""
        assert self._comm is not None
        self._rebuilt = True
        unseen = [m.index for m in reversed(self._managed) if not self._seen[m.index]]
        order = (self._deferred and self._deferred.order()) or [*self._arrival, *unseen]
        measured = self._pilot is not None
        plan = second_plan(self.method, self._managed, self._comm, order, unseen, backward_seconds, measured=measured)
        if plan != self.plan:
            self._adopt(plan)
