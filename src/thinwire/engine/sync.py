"""GradientSync: what ``attach`` returns, and what users call on it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.methods.decoupling import deferring
from thinwire.core.program import Method, Plan, State, Topology
from thinwire.engine.attached import forget, remember
from thinwire.engine.buckets import Buckets, Parameters
from thinwire.engine.controller.controller import Controller
from thinwire.engine.controller.pilot import Pilot
from thinwire.engine.controller.planning import make_plan
from thinwire.engine.executors.recorder import Recorder
from thinwire.engine.memory import prime_allocator
from thinwire.engine.parameters import Managed, model_facts, sent_at_start
from thinwire.engine.ranks.communicator import Alone, Communicator
from thinwire.engine.schedules.clip import check_norm_type
from thinwire.engine.schedules.coupled import Coupled
from thinwire.engine.schedules.decoupled import Decoupled
from thinwire.engine.schedules.schedule import Schedule
from thinwire.engine.services import Services
from thinwire.engine.session import Session
from thinwire.engine.settings import AttachSettings
from thinwire.engine.source import GradientSource
from thinwire.engine.state import persistence
from thinwire.engine.stats import Stats
from thinwire.predict.timeline import write_trace


class GradientSync:
    """Averages a model's gradients over ranks while backward runs. Made by :func:`thinwire.attach`.

    After ``backward()`` has returned, ``.grad`` holds the average; with a decoupled method, parameters are updated when
    the next forward needs them.

    Attributes:
        services: what optimizers, K-FAC and other packages use of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        managed: list[Managed],
        comm: Communicator | Alone | None,
        topology: Topology,
        scaler: Any,
        settings: AttachSettings,
        pilot: Pilot | None = None,
    ) -> None:
        self._settings = settings
        parameters, state = Parameters(managed), State(comm.rank if comm else 0, topology)
        self._session = session = Session(
            method, comm, state, scaler, lambda: parameters.names, named=settings.named,
            start=settings.start_compression_step, expected=bool(optimizers), before_step=self._before_step,
            after_step=self._after_step,
        )  # fmt: skip
        order = [m.index for m in reversed(managed)]
        first = settings.pinned or make_plan(method, managed, order, (), comm.backend if comm else "none")
        first.check(parameters.by_name)
        options, find_unused = deferring(method), settings.find_unused_parameters
        views, pauses = settings.gradient_as_bucket_view, options is not None
        self._buckets = Buckets(session, parameters, first, views=views, pauses=pauses)
        self._schedule: Schedule | None = None
        self._controller: Controller | None = None
        self._source: GradientSource | None = None
        if comm is not None:
            self._start(model, comm, first)
            if options is None:
                self._schedule = Coupled(self._buckets, find_unused=find_unused)
            else:
                self._schedule = Decoupled(model, self._buckets, optimizers, options, find_unused=find_unused)
            pinned = settings.pinned is not None
            self._controller = Controller(self._buckets, self._schedule, pilot, pinned=pinned)
            self._source = GradientSource(model, self._buckets, self._schedule, self._controller, settings, self)
            self._source.install()
        self.services = Services(model, optimizers, managed[0].device, session, self._source, self._controller)
        remember(model, self)

    def _start(self, model: nn.Module, comm: Communicator | Alone, plan: Plan) -> None:
        """Agree with the other ranks on everything, and take over rank 0's weights."""
        session, settings, managed = self._session, self._settings, self._buckets.parameters.managed
        if settings.detect_desync:
            comm.watch_order()
        comm.agree(
            session.facts()
            | model_facts(model, managed)
            | {
                "topology": list(session.topology.layout),
                "find_unused_parameters": settings.find_unused_parameters,
                "broadcast_buffers": settings.broadcast_buffers,
                "detect_desync": settings.detect_desync,
                "plan": plan.hash,
            }
        )
        session.fit()
        self._buckets.inline = not comm.side_stream()
        comm.broadcast(sent_at_start(model))
        self._buckets.adopt(plan)
        comm.start()
        if comm.device.type == "cpu":
            prime_allocator()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._source is not None:
            self._source.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._source is not None:
            self._source.after_step(optimizer)

    # --- what users call -----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backwards in this context exchange nothing."""
        source = self._source
        if source is None:
            yield
            return
        before, source.enabled = source.enabled, False
        try:
            yield
        finally:
            source.enabled = before

    def synchronize(self) -> None:
        """Do everything that is still to be done. All ranks must call it after passes that were all ``no_sync``.

        It reduces what these passes have accumulated, and gradients that the script has put into ``.grad``. With a
        decoupled method, it makes the updates that wait for the next forward: call it before reading parameters other
        than by a forward or ``state_dict``. That part is local.
        """
        schedule, source = self._schedule, self._source
        if schedule is None or source is None:
            return
        schedule.complete()
        left = schedule.accumulated or source.by_hand
        if self._buckets.pauses and not left:
            return
        if source.enabled and not self._session.running and self.services.agree(left):
            # The gradients there are not averaged yet.
            self._session.state.commit(schedule.untouched())
            source.begin()
            source.finish(observed=False)

    @property
    def plan(self) -> Plan:
        """The fusion plan in force."""
        return self._buckets.plan

    def adopt_plan(self, plan: Plan) -> None:
        """Put a plan in force from the next step on. All ranks must call it at the same step."""
        if self._session.running:
            raise RuntimeError("a plan can be adopted between steps only")
        plan.check(self._buckets.parameters.by_name)
        if self._schedule is None or self._controller is None:
            self._buckets.plan = plan
            return
        self._schedule.complete()
        self._controller.rebuilt, self._controller.waiting = True, None
        self._buckets.adopt(plan)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the parameters that wait for their update (decoupled methods)."""
        managed = self._buckets.parameters.managed
        return () if self._schedule is None else tuple(managed[i].name for i in self._schedule.pending)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the averaged gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``. Return the norm.

        Call it after ``scaler.unscale_`` and before ``optimizer.step()``; with a decoupled method, on all ranks.
        """
        schedule = self._schedule or Coupled(self._buckets, find_unused=False)
        return schedule.clip(max_norm, check_norm_type(norm_type), error_if_nonfinite)

    def stats(self) -> Stats:
        """Return counters since ``attach``, and what was decided."""
        note, controller = self._settings.note, self._controller
        if controller is None:
            return self._session.stats(note)
        found = self._session.stats(note, self._buckets.stats(), rebuilt=controller.rebuilt)
        return dataclasses.replace(found, settled=controller.settled, why=controller.why)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, flat; residuals are under ``residual/<rank>/<name>``. Makes pending updates first.

        Not a collective.
        """
        if self._schedule is not None:
            self._schedule.complete()
        return persistence.to_state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``: bit for bit at the same world size; with the mean of the residuals at another.

        A single rank sends everything, so its residual is not used: it is kept, and ``state_dict`` hands it on until
        there are several ranks again. What is still kept when training ends has not reached the model.

        Raises:
            ValueError: it does not fit the model or the method, or lacks what this rank needs; nothing has changed.
        """
        if self._schedule is not None:
            self._schedule.complete()
        persistence.from_state_dict(self, state)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Recorder]:
        """Record the steps inside as Chrome-trace JSON (for Perfetto), on the lanes of ``thinwire plan --trace``.

        Example::

            with sync.trace(f"step.{rank}.json"):
                loss.backward()
        """
        recorder, model, comm = Recorder(), self.services.model, self._session.comm
        hooks = [
            model.register_forward_pre_hook(recorder.forward_began),
            model.register_forward_hook(recorder.forward_ended),
        ]
        if comm is not None:
            comm.steps.executor.recorder = recorder
        try:
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            if comm is not None:
                comm.steps.executor.recorder = None
            write_trace(path, recorder.events, self._session.rank, f"measured, {self._session.method.name}")

    def close(self) -> None:
        """Remove the hooks, stop the communicator thread, give the process groups back. Idempotent, local."""
        session = self._session
        session.leave(sys.exc_info()[1])
        try:
            if self._schedule is not None:
                self._schedule.close(broken=session.broken is not None)
        finally:
            if self._source is not None:
                self._source.close()
            self.services.close()
            session.close()
            forget(self.services.model, self)

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
