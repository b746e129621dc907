"""GradientSync: what ``attach`` returns for methods that exchange gradients, and what users call on it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.methods.decoupling import deferring
from thinwire.core.methods.start import exact_method
from thinwire.core.program import Method, Plan, State, Topology, working_dtype
from thinwire.core.program.trace import memory
from thinwire.engine.backward_hooks import AttachSettings, BackwardHooks
from thinwire.engine.buckets import Buckets, prime_allocator
from thinwire.engine.controller.pilot import PlanController
from thinwire.engine.controller.planning import make_plan
from thinwire.engine.executors.events import Recorder
from thinwire.engine.join import StillTraining, take_over
from thinwire.engine.parameters import ManagedParameter, gradient_dtype, managed_parameters, model_facts, sent_at_start
from thinwire.engine.ranks.agreement import OrderCheck
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.schedules.coupled import Coupled
from thinwire.engine.schedules.decoupled import Decoupled
from thinwire.engine.services import CheckedState, Handle, Services
from thinwire.engine.session import Session
from thinwire.engine.state.persistence import (
    LOCAL,
    blank,
    check_version,
    from_flat,
    frozen_since,
    on_device,
    options_of,
    to_flat,
    without,
)
from thinwire.engine.stats import Stats
from thinwire.predict.timeline import write_trace

log = logging.getLogger("thinwire")


class GradientSync(Handle):
    """Averages a model's gradients over ranks while backward runs. Made by :func:`thinwire.attach`.

    After ``backward()`` has returned, ``.grad`` holds the average; with a decoupled method, parameters are updated when
    the next forward needs them. On one rank, gradients are left alone, unless the method is decoupled.

    Attributes:
        services: what optimizers, K-FAC and other packages use of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        managed: list[ManagedParameter],
        comm: Communicator,
        topology: Topology,
        scaler: Any,
        settings: AttachSettings,
        controller: PlanController,
    ) -> None:
        self._settings, self._controller = settings, controller
        order, options = [m.index for m in reversed(managed)], deferring(method)
        first = settings.pinned or make_plan(method, managed, order, (), comm.backend)
        self._session = session = Session(
            method, comm, State(comm.rank, topology), scaler, {}, named=settings.named,
            start=settings.start_compression_step, expected=bool(optimizers),
        )  # fmt: skip
        self._buckets = buckets = Buckets(
            session, managed, first, views=settings.gradient_as_bucket_view, pauses=options is not None
        )
        first.check(buckets.by_name)
        self._exchanges = topology.world_size > 1 or options is not None
        if self._exchanges:
            self._start(model, first, optimizers)
        find_unused = settings.find_unused_parameters
        self._schedule: Coupled
        if options is None:
            self._schedule = Coupled(buckets, find_unused=find_unused)
        else:
            self._schedule = Decoupled(model, buckets, optimizers, options, find_unused=find_unused)
        self._source = BackwardHooks(model, buckets, self._schedule, controller, settings)
        if self._exchanges:
            controller.bind(buckets, self._schedule)
            self._source.install()
        self.services = Services(model, optimizers, managed[0].device, session, self._source, controller)
        self.services.own_buffers = not settings.broadcast_buffers
        self.services.remember(self)

    def _start(self, model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        session, settings, comm = self._session, self._settings, self._session.comm
        if settings.detect_desync:
            comm.order = OrderCheck(comm.topology)
        comm.agree(
            session.facts()
            | model_facts(model, self._buckets.managed, optimizers if settings.on_failure is None else ())
            | {
                "topology": list(session.topology.layout),
                "find_unused_parameters": settings.find_unused_parameters,
                "broadcast_buffers": settings.broadcast_buffers,
                "detect_desync": settings.detect_desync,
                "look": str(settings.look),
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

    # --- what users call -----------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backwards in this context exchange nothing."""
        before, self._source.enabled = self._source.enabled, False
        try:
            yield
        finally:
            self._source.enabled = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = False) -> Iterator[None]:
        """Let ranks have different numbers of batches: wrap the loop, on all ranks.

        A rank whose loop is over sends zeros until all are done. Averages are over the ranks that still have data. In
        the end all ranks have the weights, buffers and optimizer states of those that went on; a GradScaler's, too, if
        it was passed to ``attach``. It costs one small exchange per step.

        Args:
            divide_by_initial_world_size: averages count ranks without data, too, as those of torch's ``Join``.

        Raises:
            ValueError: the method is decoupled, or other packages (K-FAC) take part in each step.
        """
        session, source = self._session, self._source
        if not self._exchanges or session.state.size == 1:
            yield
            return
        if self._buckets.pauses or self.services.companions or self._settings.on_failure is not None:
            why = ", ".join(self.services.companions) or session.method.name
            raise ValueError(f"join() has no part for what {why} does in a step: give all ranks as many batches")
        source.going = going = StillTraining(session.comm, initial=divide_by_initial_world_size)
        try:
            yield
            while going.told(False):
                source.begin()
                source.finish(observed=False)
                session.state.commit(session.watch.names.values())
                for m in self._buckets.managed:
                    m.parameter.grad = None
            if going.ranks:
                optimizers, weights = self.services.optimizers, sent_at_start(self.services.model)
                take_over(session.comm, weights, optimizers, session.scaler, going.ranks[0])
        finally:
            source.going = None

    def synchronize(self) -> None:
        """Do everything that is still to be done. All ranks must call it after passes that were all ``no_sync``.

        It reduces what these passes have accumulated, and gradients that the script has put into ``.grad``. With a
        decoupled method, it makes the updates that wait for the next forward: call it before reading parameters other
        than by a forward or ``state_dict``. That part is local.
        """
        if not self._exchanges:
            return
        schedule, source = self._schedule, self._source
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
        plan.check(self._buckets.by_name)
        if not self._exchanges:
            self._buckets.plan = plan
            return
        self._schedule.complete()
        self._controller.rebuilt, self._controller.waiting = True, None
        self._buckets.adopt(plan)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the parameters that wait for their update (decoupled methods)."""
        return tuple(self._buckets.managed[i].name for i in self._schedule.pending)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the averaged gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``. Return the norm.

        Call it after ``scaler.unscale_`` and before ``optimizer.step()``; with a decoupled method, on all ranks.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} must be above 0; float('inf') is the largest element")
        return self._schedule.clip(max_norm, norm_type, error_if_nonfinite)

    def stats(self) -> Stats:
        """Return counters since ``attach``, and what was decided."""
        controller = self._controller
        if not self._exchanges:
            return self._session.stats(self._settings.note)
        found = self._session.stats(self._settings.note, self._buckets.stats(), rebuilt=controller.rebuilt)
        return dataclasses.replace(found, settled=controller.settled, why=controller.why)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, flat; residuals are under ``residual/<rank>/<name>``. Makes pending updates first.

        Not a collective.
        """
        self._schedule.complete()
        flat = to_flat(self._session, self._blanks(), None) | {"plan": self.plan.to_json()}
        for name, companion in self.services.companions.items():
            flat |= {f"companion/{name}/{key}": value for key, value in companion.state_dict().items()}
        return flat

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``: bit for bit at the same world size; with the mean of the residuals at another.

        A single rank sends everything, so its residual is not used: it is kept, and ``state_dict`` hands it on until
        there are several ranks again. What is still kept when training ends has not reached the model.

        Raises:
            ValueError: it does not fit the model or the method, or lacks what this rank needs; nothing has changed.
        """
        self._schedule.complete()
        super().load_state_dict(state)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Recorder]:
        """Record the steps inside as Chrome-trace JSON (for Perfetto), on the lanes of ``thinwire plan --trace``.

        Example::

            with sync.trace(f"step.{rank}.json"):
                loss.backward()
        """
        recorder, model, executor = Recorder(), self.services.model, self._session.comm.executor
        hooks = [
            model.register_forward_pre_hook(recorder.forward_began),
            model.register_forward_hook(recorder.forward_ended),
        ]
        executor.recorder = recorder
        try:
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            executor.recorder = None
            write_trace(path, recorder.events, self._session.rank, f"measured, {self._session.method.name}")

    def close(self) -> None:
        """Remove the hooks, stop the communicator thread, give the process groups back. Idempotent, local."""
        session = self._session
        session.leave(sys.exc_info()[1])
        try:
            self._schedule.close(broken=session.broken is not None)
        finally:
            self._source.close()
            self.services.close()
            session.close()

    # --- state ---------------------------------------------------------------------------------------------------

    def _blanks(self) -> dict[str, Any]:
        """Return zeros for all state that this rank will have, or keep for when there are several ranks."""
        session, buckets = self._session, self._buckets
        method, rank, topology = session.named, session.rank, session.topology
        managed, dense = buckets.managed, session.dense
        if method is not session.method:
            managed = managed_parameters(self.services.model, method, self._settings.keep_dense)
            dense = exact_method(method)
        compressed = [(m.name, m.parameter) for m in managed if not m.dense]
        flat: dict[str, Any] = {}
        if not method.shards:
            flat |= blank(method, compressed, topology, rank)
        elif method is not session.method:  # full size: there are no shards
            flat |= {
                f"residual/{rank}/{name}": torch.zeros_like(x, dtype=working_dtype(gradient_dtype(x)))
                for name, x in compressed
            }
        else:  # slices that follow from the plan in force
            for entry in self.plan.buckets(session.state.step):
                if entry.dense:
                    continue
                shapes = [(name, buckets.by_name[name].shape) for name in entry.names]
                first = buckets.by_name[entry.names[0]].parameter
                found = memory(method, shapes, topology, rank=rank, dtype=gradient_dtype(first))
                for name, value in found.residuals.items():
                    flat[f"residual/{rank}/{name}"] = torch.zeros_like(value, device=first.device)
                    flat[f"offset/{rank}/{name}"] = found.offsets[name]
        return flat | blank(dense, [(m.name, m.parameter) for m in managed if m.dense], topology, rank)

    def _fitting(self, state: Mapping[str, Any]) -> CheckedState:
        check_version(state)
        if LOCAL in state:
            raise ValueError(
                f"the state was saved under local steps, {state[LOCAL]}, but here gradients are exchanged: attach with "
                "those, or start from the weights in the checkpoint's model.pt"
            )
        session, managed = self._session, self._buckets.managed
        state = without(state, frozen_since(self.services.model, {m.name for m in managed}))
        snapshot = on_device(from_flat(session, state, {m.name: m.shape for m in managed}), self.services.device)
        companions: dict[str, dict[str, Any]] = {}
        for name in self.services.companions:
            prefix = f"companion/{name}/"
            if saved := {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}:
                companions[name] = saved
            else:
                log.warning("thinwire: the state was saved without %s, which starts over", name)
        for name in {key.split("/")[1] for key in state if key.startswith("companion/")} - companions.keys():
            log.warning("thinwire: the state holds that of %s, which is not here: it is left out", name)
        before, now = json.loads(state["options"]), json.loads(options_of(session.named))
        same = state["method"] == session.named.name and all(now.get(key) == value for key, value in before.items())
        stands_in, plan = session.named is not session.method, None
        one = int(state["world_size"]) == 1  # a method that stands in on one rank makes plans for itself only
        if self._settings.pinned is None and same and state.get("plan") and stands_in == one:
            plan = Plan.from_json(state["plan"])
            try:
                plan.check(m.name for m in managed)
            except ValueError:
                plan = None  # another set of trainable parameters: the fresh plan stays
        return CheckedState(
            partial(self._restore, snapshot, companions), lambda: None if plan is None else self.adopt_plan(plan)
        )

    def _restore(self, snapshot: dict[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> Callable[[], None]:
        """Take over a state of the session and of the companions that were saved. Return what undoes it."""
        state = self.services.state
        before, restored = state.snapshot(), state.restored
        companions = [(self.services.companions[name], one) for name, one in saved.items()]
        earlier = [companion.state_dict() for companion, _ in companions]
        loaded = 0

        def undo() -> None:  # the step first: companions count from it
            state.restore(before)
            state.restored = restored
            for (companion, _), held in zip(companions[:loaded], earlier):
                companion.load_state_dict(held)

        state.restore(snapshot)
        try:
            for companion, one in companions:
                companion.load_state_dict(one)
                loaded += 1
        except BaseException:
            undo()
            raise
        return undo
