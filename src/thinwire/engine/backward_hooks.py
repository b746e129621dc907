"""The gradients of an attached model: hooks on its parameters tell when buckets are ready and when backward has ended.

hooks -> BackwardHooks -> Buckets -> executor     a gradient arrives; its bucket's program runs while backward runs
         BackwardHooks -> Session.finish -> Coupled.deliver -> Session.commit                    the end of backward
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from thinwire.core.checks import check_count, check_flag
from thinwire.core.program import Method, Plan
from thinwire.core.program.ops import own_modes
from thinwire.engine.buckets import Buckets
from thinwire.engine.controller.pilot import Decision, PlanController
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.engine.hooks import ModuleHook, WithoutHooks, current_task
from thinwire.engine.join import StillTraining
from thinwire.engine.look import Look
from thinwire.engine.parameters import Buffers, DenseRule, ignored, managed_parameters
from thinwire.engine.schedules.coupled import Coupled
from thinwire.engine.session import INTERRUPTED


class BackwardEnd:
    """Calls back once, when a backward pass in which ``note`` was called has ended, by autograd's private interface.

    Under reentrant activation checkpointing, backwards run inside a backward, each with its own end: the outermost
    counts. Modules' forward hooks note passes too: a forward that is rerun inside backward belongs to the outer one.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._open: set[int] = set()

    def note(self) -> None:
        """Make sure that the end of the current backward pass is noticed; called from hooks that run inside it."""
        task = current_task()
        if task == -1 or task in self._open:
            return
        self._open.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._ended(task))

    def _ended(self, task: int) -> None:
        self._open.discard(task)
        self._open = {t for t in self._open if t < task}  # inner passes that ended with an exception never call back
        if not self._open:
            self._callback()

    def outside(self) -> bool:
        """Return True if no pass is running although one was noted: it ended with an exception. For forward hooks."""
        died = bool(self._open) and current_task() == -1
        if died:
            self._open.clear()
        return died


_registered = 0  # modules and parameters registered anywhere in the process since the first ``attach``
_counting = False


def _count(*_: Any) -> None:
    global _registered
    _registered += 1


_ATTACH_AGAIN = (
    "Call close() and attach again after such a change; state_dict() and load_state_dict() carry residuals over"
)


class LateParameters:
    """Finds parameters made trainable after ``attach``, which nothing averages, before a step if something is new.

    ``way``: how a script goes on after such a change.
    """

    def __init__(self, model: nn.Module, way: str) -> None:
        global _counting
        if not _counting:
            _counting = True
            register_module_module_registration_hook(_count)
            register_module_parameter_registration_hook(_count)
        self._model, self._way, self._looked = model, way, _registered
        self._foreign: dict[int, weakref.ref[Tensor]] = {}

    def check(self, optimizer: torch.optim.Optimizer, known: Container[int]) -> bool:
        """Return whether an optimizer owns our parameters. RuntimeError: it would use gradients not ``known``."""
        ours, strange = False, []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in known:
                    ours = True
                elif p.grad is not None and ((ref := self._foreign.get(id(p))) is None or ref() is not p):
                    strange.append(p)
        if strange or (ours and self._looked != _registered):
            self._looked = _registered
            self._refuse(known)
            self._foreign.update((id(p), weakref.ref(p)) for p in strange)
        return ours

    def _refuse(self, known: Container[int]) -> None:
        named, left_out = self._model.named_parameters(), ignored(self._model)
        late = [name for name, p in named if p.requires_grad and id(p) not in known and name not in left_out]
        if late:
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            raise RuntimeError(
                f"{', '.join(late[:3])}{more}: trainable now, but not when the model was attached (frozen then, added "
                f"or replaced since), so what they learn is not averaged. {self._way}"
            )


@dataclass(frozen=True)
class AttachSettings:
    start_compression_step: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    pinned: Plan | None = None
    timeout: timedelta | None = None
    detect_desync: bool = False
    keep_dense: DenseRule = "auto"
    on_failure: Callable[[Exception], None] | None = None
    look: Look | None = None
    note: str = ""  # what is not done because there is only one rank
    named: Method | None = None  # the method whose state is kept, if another runs in its place

    def __post_init__(self) -> None:
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"):
            check_flag(name, getattr(self, name))
        if self.start_compression_step is not None:
            check_count("start_compression_step", self.start_compression_step, 0)


class BackwardHooks:
    """The gradient source of one attached model."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        schedule: Coupled,
        controller: PlanController,
        settings: AttachSettings,
    ) -> None:
        self._model, self._buckets, self._schedule, self._controller = model, buckets, schedule, controller
        self._settings = settings
        self.enabled = True  # False inside ``no_sync``
        self.going: StillTraining | None = None  # inside ``join``
        self._factor = 1.0  # of averages, if some ranks have no data any more
        self.expected: frozenset[int] | None = None  # what the next backward can reach; None: all
        self._end, self._late = BackwardEnd(self.finish), LateParameters(model, _ATTACH_AGAIN)
        follow = settings.broadcast_buffers and buckets.session.state.size > 1
        self.buffers = Buffers(model, buckets.session.comm) if follow else None
        self._hooks: list[Any] = []
        self._exchanged = 0  # exchanges so far
        self._used: dict[int, tuple[int, Any]] = {}  # at each optimizer's last step: exchanges, its first gradient
        self._note()

    def install(self) -> None:
        model, executor = self._model, self._buckets.session.comm.executor
        streams = executor if isinstance(executor, StreamExecutor) else None
        self._buckets.session.watch.listen(self.before_step, self.after_step)
        for m in self._buckets.managed:
            self._hooks.append(m.parameter.register_post_accumulate_grad_hook(partial(self._arrive, m.index, streams)))
        before, readers = self._schedule.before_forward, set(self._schedule.readers)
        untraced = torch.compiler.disable(before) if readers else before
        timed = model if self._controller.timings is not None else None

        def read(module: nn.Module, args: Any) -> None:  # one hook, because a hook costs more than its work
            compiling = torch.compiler.is_compiling()  # the model was compiled after ``attach``
            (untraced if compiling else before)(module)
            self._forward_began(compiling, module is timed)

        def other(module: nn.Module, args: Any) -> None:
            self._forward_began(torch.compiler.is_compiling(), module is timed)

        for module in model.modules():
            self._hooks.append(WithoutHooks(module))
            if module in readers:
                self._hooks.append(module.register_forward_pre_hook(ModuleHook(read), prepend=True))
            elif module is model or any(True for _ in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(ModuleHook(other)))

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _forward_began(self, compiling: bool, timed: bool) -> None:
        if not compiling:
            _refuse_ddp_around()
        if (compiling and not timed) or not self.enabled:  # avoid a graph break in each module
            return
        running = self._buckets.session.running
        if not self._end.outside():
            self._end.note()  # a forward that is rerun inside backward belongs to the outer pass
        elif running:
            self._buckets.session.fail(INTERRUPTED)
        if timed and not running and (timings := self._controller.timings) is not None:
            timings.forward()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        session, buckets = self._buckets.session, self._buckets
        if not self._late.check(optimizer, buckets.names):
            return
        if session.running:
            raise RuntimeError(
                "optimizer.step() in the middle of the exchange: .grad holds the averages when backward() has ended, "
                "so step() cannot be called from a hook inside it (nor after a backward that ended with an exception)"
            )
        if self.enabled and not self._schedule.accumulated and session.state.size > 1:
            self._refuse_by_hand(optimizer)
        if session.method.has_residual:
            held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in buckets.names)
            self._schedule.used([buckets.by_name[buckets.names[id(p)]].index for p in held])
            session.find_scaler(optimizer)

    def _refuse_by_hand(self, optimizer: torch.optim.Optimizer) -> None:
        before, was = self._used.get(id(optimizer), (0, None))
        found = self._gradients(optimizer)
        if not found or before != self._exchanged:
            return
        again = was is not None and was() is found[0]  # a second step with the same averages
        if not again and any(bool(grad.any()) for grad in found):  # zeros are of before a closure is called
            raise RuntimeError(
                "optimizer.step() would use gradients that no backward has made (torch.autograd.grad, torch.func, or "
                ".grad set by the script), so they are not averaged: call synchronize() of attach's handle first. If "
                "load_state_dict has put other parameters in place (swap_module_params_on_conversion), attach after it"
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that an optimizer has used; an update in the step has put new ones there."""
        if found := self._gradients(optimizer):
            self._used[id(optimizer)] = self._exchanged, weakref.ref(found[0])
            if self._buckets.pauses:
                self._note()

    def _gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        names, groups = self._buckets.names, optimizer.param_groups
        return [p.grad for g in groups for p in g["params"] if id(p) in names and p.grad is not None]

    def _note(self) -> None:
        held = ((m.index, m.parameter.grad) for m in self._buckets.managed)
        # What the last exchange has left, or was there at ``attach``, by parameter.
        self._averages = {index: weakref.ref(grad) for index, grad in held if grad is not None}

    @property
    def by_hand(self) -> bool:
        """Whether there are gradients that no backward has made, and that no optimizer has used."""
        for m in self._buckets.managed:
            known = self._averages.get(m.index)
            if m.parameter.grad is not None and (known is None or known() is not m.parameter.grad):
                return True
        return False

    def _arrive(self, index: int, streams: StreamExecutor | None, parameter: Tensor) -> None:
        grad = parameter.grad
        if not self.enabled:
            self._schedule.accumulate(index, grad)
            return
        buckets = self._buckets
        self._end.note()  # first, so that a pass that raises in ``begin`` is noted too
        if not buckets.session.running:
            self.begin()
            if not self.enabled:  # the exchange has already failed
                return
        step, name = buckets.step, buckets.managed[index].name
        if step.seen[index]:
            raise RuntimeError(
                f"{name} received a gradient twice in one backward, after its exchange had begun; "
                "use torch.utils.checkpoint with use_reentrant=False, or use the shared module only once"
            )
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(f"{name} received a sparse gradient, which thinwire does not exchange: use sparse=False")
        if self._schedule.watched:
            self._schedule.check(index, grad)
        if self.expected is not None and index not in self.expected:
            raise RuntimeError(f"{name} received a gradient, but expect() did not name it")
        step.seen[index] = True
        step.arrival.append(index)
        if (timings := self._controller.timings) is not None:
            timings.arrived(index)
        bucket = step.where[index]
        if streams is not None:
            streams.arrived(bucket)
        step.left[bucket] -= 1
        if step.left[bucket] == 0:
            buckets.ready(bucket)

    def expect(self, names: Iterable[str]) -> None:
        chosen, by_name = list(names), self._buckets.by_name
        if unknown := [name for name in chosen if name not in by_name]:
            raise ValueError(f"expect() names {unknown[0]}, which is not a trainable parameter of the model")
        if self._buckets.pauses:
            raise ValueError("expect() is for methods that are not decoupled")
        self.expected = frozenset(by_name[name].index for name in chosen)

    # --- one step ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        buckets, session = self._buckets, self._buckets.session
        session.check_usable()
        self._check_dtypes()
        if (decision := self._controller.waiting) is not None:
            self._controller.waiting = None
            with own_modes():
                self.follow(decision)
        self._factor = 1.0 if self.going is None else self.going.factor()
        if session.method.has_residual:
            session.state.held = frozenset(m.name for m in buckets.managed if not m.parameter.requires_grad)
        self._schedule.begin()  # may raise
        step = buckets.begin(self.expected, time.perf_counter())
        if (buffers_sent := self._sent_buffers()) is not None:
            try:
                buffers_sent.send()
            except RuntimeError as error:
                self._failed(error)
                return
        for index, left in enumerate(step.left):
            if not left:  # no gradient is expected: the bucket has only what earlier passes accumulated
                buckets.ready(index)

    def _sent_buffers(self) -> Buffers | None:
        """Return what gives all ranks rank 0's buffers in this step; None: none change, or it has no data any more."""
        if self.buffers is None or self.buffers.idle:
            return None
        return self.buffers if self.going is None or 0 in self.going.ranks else None

    def finish(self, *, observed: bool = True) -> None:
        """End the backward: launch what is left, wait, deliver, commit. ``observed``: its order of arrival counts."""
        session = self._buckets.session
        if not session.running:
            return
        try:
            with own_modes():
                self._finish(observed)
        except RuntimeError as error:
            self._failed(error)
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if self._buckets.session.broken is None:  # whatever the error, the other ranks may have gone on
            self._buckets.session.give_up(str(error) or type(error).__name__)

    def _failed(self, error: RuntimeError) -> None:
        """End the exchange for good. Raise the error, or hand it to ``on_failure``."""
        self._give_up(error)
        if self._settings.on_failure is None:
            raise error
        self.enabled = False
        self._settings.on_failure(error)

    def _finish(self, observed: bool) -> None:
        buckets, session = self._buckets, self._buckets.session
        step, comm = buckets.step, session.comm
        for bucket, left in enumerate(step.left):
            if left:
                buckets.ready(bucket)
        if (recorder := comm.executor.recorder) is not None:
            recorder.backward_ended()
        backward_seconds = time.perf_counter() - step.began
        session.finish()
        if comm.order is not None:
            comm.check_order(session.state.step)
        if (buffers_sent := self._sent_buffers()) is not None:
            buffers_sent.receive()
        self._schedule.deliver()
        if self._factor != 1:
            self._schedule.multiply(self._factor)
        self._exchanged += 1
        self._note()
        self.expected = None
        session.averaged(buckets.nbytes)
        measures = not self._controller.rebuilt or self._controller.timings is not None
        if measures and (self.going is None or self.going.all):  # a rank without data has nothing to measure
            decision = self._controller.after_step(step if observed else None, backward_seconds)
            if decision is not None:
                self.follow(decision)
        if self._settings.on_failure is not None:
            # A rank sends this once it has received everything: if all have sent it, all will keep the step.
            comm.gather_tensor(torch.ones(1, device=comm.device))

    def follow(self, decision: Decision) -> None:
        """Carry out a decision of the controller, between two steps, on all ranks alike."""
        buckets, method, asked = self._buckets, decision.method, self._settings.start_compression_step
        if method is not None:
            buckets.session.run_as(method, asked)
            buckets.session.fit()
            buckets.manage(managed_parameters(self._model, method, self._settings.keep_dense))
        self._controller.why = decision.why
        buckets.adopt(decision.plan)

    def _check_dtypes(self) -> None:
        for m in self._buckets.managed:
            if m.parameter.dtype is not m.dtype or m.parameter.device != m.device:
                raise RuntimeError(
                    f"{m.name} is {m.parameter.dtype} on {m.parameter.device} now, but was {m.dtype} on {m.device} "
                    "when the model was attached: call close(), change the model, and attach again"
                )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _refuse_ddp_around() -> None:
    """Raise ``RuntimeError`` inside the forward of a DDP module that exchanges gradients itself."""
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync:
        return
    if not ddp._comm_hooks or not all(getattr(hook, "keeps_own", False) for hook, _ in ddp._comm_hooks):
        raise RuntimeError(
            "the model is attached, and DistributedDataParallel around it or a part of it exchanges the gradients "
            "again: leave one of the two out, or use model.register_comm_hook(*thinwire.ddp_hook(...))"
        )
