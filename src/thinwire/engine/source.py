"""The gradients of an attached model: hooks on its parameters tell when buckets are ready and when backward has ended.

hooks -> GradientSource -> Buckets -> executor     a gradient arrives; its bucket's program runs while backward runs
         GradientSource -> Session.finish -> Schedule.deliver -> Session.commit                    the end of backward
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.program.ops import own_modes
from thinwire.engine.backward_end import BackwardEnd
from thinwire.engine.buckets import Buckets
from thinwire.engine.buffers import Buffers
from thinwire.engine.controller.controller import Controller
from thinwire.engine.controller.pilot import Decision
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.engine.hooks import ModuleHook, WithoutHooks
from thinwire.engine.late_parameters import LateParameters
from thinwire.engine.parameters import managed_parameters
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.schedules.schedule import Schedule
from thinwire.engine.session import INTERRUPTED
from thinwire.engine.settings import AttachSettings


class GradientSource:
    """The gradient source of one attached model.

    Args:
        model: the root module.
        buckets: of its plan.
        schedule: delivers averages.
        controller: chooses plans.
        settings: of ``attach``.
        handle: what ``attach`` has returned; the hooks keep it alive.

    Attributes:
        enabled: whether the next backward is exchanged; False inside ``no_sync``.
        expected: indices of the parameters that the next backward can reach; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        schedule: Schedule,
        controller: Controller,
        settings: AttachSettings,
        handle: object,
    ) -> None:
        self._model, self._buckets, self._schedule, self._controller = model, buckets, schedule, controller
        self._settings, self._handle = settings, handle
        self.enabled = True
        self.expected: frozenset[int] | None = None
        self._end = BackwardEnd(self.finish)
        self._steps = _StepChecks(model, buckets)
        comm, sends = buckets.session.comm, settings.broadcast_buffers
        self.buffers = Buffers(model, comm) if sends and isinstance(comm, Communicator) else None
        self._hooks: list[Any] = []

    def install(self) -> None:
        model, pilot, comm = self._model, self._controller.pilot, self._buckets.session.comm
        assert comm is not None
        executor = comm.steps.executor
        streams = executor if isinstance(executor, StreamExecutor) else None
        for m in self._buckets.parameters.managed:
            self._hooks.append(m.parameter.register_post_accumulate_grad_hook(partial(self._arrive, m.index, streams)))
        before, readers = self._schedule.before_forward, set(self._schedule.readers)
        untraced = torch.compiler.disable(before) if readers else before

        timed = model if pilot is not None else None

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
        if timed and not running and (pilot := self._controller.pilot) is not None:
            pilot.timings.forward()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that is about to step; called for any optimizer of the process."""
        session, parameters = self._buckets.session, self._buckets.parameters
        if not self._steps.ours(optimizer):
            return
        if session.running:
            raise RuntimeError(
                "optimizer.step() in the middle of the exchange: .grad holds the averages when backward() has ended, "
                "so step() cannot be called from a hook inside it (nor after a backward that ended with an exception)"
            )
        self._steps.refuse_by_hand(optimizer, may=not self.enabled or self._schedule.accumulated)
        if session.method.has_residual:
            held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in parameters.names)
            self._schedule.used([parameters.by_name[parameters.names[id(p)]].index for p in held])
            session.find_scaler(optimizer)

    @property
    def by_hand(self) -> bool:
        """Whether there are gradients that no backward has made, and that no optimizer has used."""
        return self._steps.by_hand()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped; called for any optimizer of the process."""
        self._steps.used(optimizer)

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
        step, name = buckets.step, buckets.parameters.managed[index].name
        assert step is not None
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
        if (pilot := self._controller.pilot) is not None:
            pilot.timings.arrived(index)
        bucket = step.where[index]
        if streams is not None:
            streams.arrived(bucket)
        step.left[bucket] -= 1
        if step.left[bucket] == 0:
            buckets.ready(bucket)

    def expect(self, names: Iterable[str]) -> None:
        chosen, by_name = list(names), self._buckets.parameters.by_name
        if unknown := [name for name in chosen if name not in by_name]:
            raise ValueError(f"expect() names {unknown[0]}, which is not a trainable parameter of the model")
        if self._buckets.pauses:
            raise ValueError("expect() is for methods that are not decoupled")
        self.expected = frozenset(by_name[name].index for name in chosen)

    # --- one step ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step, at the first gradient of a backward."""
        buckets, session = self._buckets, self._buckets.session
        session.check_usable()
        self._check_dtypes()
        with own_modes():  # the network and kernels are measured here
            decision = self._controller.before_step()
        if decision is not None:
            self.follow(decision)
        if session.method.has_residual:
            frozen = (m.name for m in buckets.parameters.managed if not m.parameter.requires_grad)
            session.state.held = frozenset(frozen)
        self._schedule.begin()  # may raise
        step = buckets.begin(self.expected, time.perf_counter())
        assert session.comm is not None
        names = [entry.names for entry in step.entries]
        session.comm.steps.begin(session.state.step, names, buckets.program, pause=buckets.pauses)
        if self.buffers is not None:
            try:
                self.buffers.send()
            except RuntimeError as error:
                self._failed(error)
                return
        for index, left in enumerate(step.left):
            if not left:  # no gradient is expected: the bucket has only what earlier passes accumulated
                buckets.ready(index)

    def finish(self, *, observed: bool = True) -> None:
        """End the backward: launch the buckets that are left, wait, deliver, commit.

        Args:
            observed: False: do not use the order in which gradients arrived.
        """
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
        assert step is not None
        assert comm is not None
        for bucket, left in enumerate(step.left):
            if left:
                buckets.ready(bucket)
        if (recorder := comm.steps.executor.recorder) is not None:
            recorder.backward_ended()
        backward_seconds = time.perf_counter() - step.began
        session.finish()
        comm.check_order(session.state.step)
        if self.buffers is not None:
            self.buffers.receive()
        self._schedule.deliver()
        self._steps.delivered()
        self.expected = None
        session.counters.sent(buckets.parameters.nbytes, session.state.size)
        if (decision := self._controller.after_step(step if observed else None, backward_seconds)) is not None:
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
            buckets.parameters.manage(managed_parameters(self._model, method, self._settings.keep_dense))
        self._controller.why = decision.why
        buckets.adopt(decision.plan)

    def _check_dtypes(self) -> None:
        for m in self._buckets.parameters.managed:
            if m.parameter.dtype is not m.dtype or m.parameter.device != m.device:
                raise RuntimeError(
                    f"{m.name} is {m.parameter.dtype} on {m.parameter.device} now, but was {m.dtype} on {m.device} "
                    "when the model was attached: call close(), change the model, and attach again"
                )

    def close(self) -> None:
        """Remove the hooks."""
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


class _StepChecks:
    """What must hold when an optimizer steps: what it uses was exchanged."""

    def __init__(self, model: nn.Module, buckets: Buckets) -> None:
        self._late, self._parameters, self._again = LateParameters(model), buckets.parameters, buckets.pauses
        self._alone = buckets.session.state.size == 1
        self._exchanged = 0  # exchanges so far
        self._used: dict[int, tuple[int, Any]] = {}  # at each optimizer's last step: exchanges, its first gradient
        self._note()

    def ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer that is about to step owns parameters of the model.

        Raises:
            RuntimeError: it would use gradients of parameters that are not exchanged; names them.
        """
        return self._late.check(optimizer, self._parameters.names)

    def refuse_by_hand(self, optimizer: torch.optim.Optimizer, *, may: bool) -> None:
        """Raise ``RuntimeError`` if it would use gradients that no backward has made, unless it ``may``."""
        before, was = self._used.get(id(optimizer), (0, None))
        found = self._gradients(optimizer)
        if not found or may or self._alone or before != self._exchanged:
            return
        again = was is not None and was() is found[0]  # a second step with the same averages
        if not again and any(bool(grad.any()) for grad in found):  # zeros are of before a closure is called
            raise RuntimeError(
                "optimizer.step() would use gradients that no backward has made (torch.autograd.grad, torch.func, or "
                ".grad set by the script), so they are not averaged: call synchronize() of attach's handle first"
            )

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that an optimizer has used; an update in the step has put new ones there."""
        if found := self._gradients(optimizer):
            self._used[id(optimizer)] = self._exchanged, weakref.ref(found[0])
            if self._again:
                self._note()

    def _gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        names, groups = self._parameters.names, optimizer.param_groups
        return [p.grad for g in groups for p in g["params"] if id(p) in names and p.grad is not None]

    def delivered(self) -> None:
        """Note that ``.grad`` holds new averages."""
        self._exchanged += 1
        self._note()

    def _note(self) -> None:
        held = ((m.index, m.parameter.grad) for m in self._parameters.managed)
        # What the last exchange has left, or was there at ``attach``, by parameter.
        self._averages = {index: weakref.ref(grad) for index, grad in held if grad is not None}

    def by_hand(self) -> bool:
        """Return whether there is a gradient that no exchange has left."""
        for m in self._parameters.managed:
            known = self._averages.get(m.index)
            if m.parameter.grad is not None and (known is None or known() is not m.parameter.grad):
                return True
        return False
