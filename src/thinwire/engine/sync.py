"""GradientSync: what ``attach`` returns, and what users call on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.engine import clip, persistence
from thinwire.engine.channel import Channel
from thinwire.engine.communicator import Communicator
from thinwire.engine.late import in_words
from thinwire.engine.recorder import Recorder
from thinwire.engine.settings import Settings
from thinwire.engine.stats import BucketStats, Stats
from thinwire.engine.steps import Steps, _attached, attached_to
from thinwire.planner.costs import Costs, assumed_compute
from thinwire.planner.timeline import write_trace
from thinwire.program import Plan, PlanBucket, Program, Scope, Topology

__all__ = ["GradientSync", "Settings", "attached_to"]


class GradientSync(Steps):
    """Averages a model's gradients over ranks while backward runs. Made by :func:`thinwire.attach`.

    After ``backward()`` has returned, ``.grad`` holds the average; with a decoupled method, parameters are up to date
    when the next forward needs them.
    """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backwards in this context exchange nothing."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def synchronize(self) -> None:
        """Do all that is still to be done. All ranks must call it after passes that were all ``no_sync``.

        What these have accumulated is reduced. With a decoupled method, updates that wait for the next forward are
        made, before parameters are read by other means than a forward or ``state_dict``: that part is local.
        """
        if self._deferred is not None:
            self._deferred.complete()
            if not self._deferred.accumulated:
                return
        if self._comm is not None and self._enabled and not self._running:
            if not self.agree(self._owed):
                return  # what is there is averaged already
            self.state.commit({m.name for m in self._managed if self._delivered.holds(m.index, m.parameter.grad)})
            self._begin()
            self._rebuilt, before = True, self._rebuilt
            self._finish()
            self._rebuilt = before

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the parameters that wait for their update (decoupled methods)."""
        return () if self._deferred is None else tuple(self._managed[i].name for i in self._deferred.pending)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the averaged gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``. Returns the norm.

        After ``scaler.unscale_``, before ``optimizer.step()``. With a decoupled method all ranks must call it.
        """
        norm_type = clip.check_norm_type(norm_type)
        if self._deferred is not None:
            norm = self._deferred.clip(max_norm, norm_type, error_if_nonfinite)
            if norm is not None:
                return norm
        buckets = [[self._by_name[name].parameter for name in entry.names] for entry in self._last_plan()]
        return clip.coupled(buckets, self.topology.world_size, max_norm, norm_type, error_if_nonfinite)

    def _last_plan(self) -> tuple[PlanBucket, ...]:
        """The buckets of the last step."""
        return self.plan.buckets(max(0, self.state.turn - 1))

    def run(self, program: Program, *, lane: str = "control") -> Any:
        """Run a program on tensors that are not parameters, now, in the calling thread, on lanes of its own.

        All ranks must call it at the same point with programs that issue the same ops. Returns the program's value.
        """
        if self._comm is not None:
            return self._comm.run(program, lane)
        from thinwire.engine.alone import run_alone

        return run_alone(program)

    @property
    def synchronizing(self) -> bool:
        """Whether the next backward will be exchanged: False inside ``no_sync``."""
        return self._enabled

    def channel(self, purpose: str, depth: Mapping[Scope, int], topology: Topology | None = None) -> Channel:
        """A way to run programs on tensors that are not parameters while training goes on; ended by ``close``.

        All ranks must call it at the same point. See :class:`~thinwire.engine.channel.Channel`.

        Args:
            purpose: keeps its lanes apart from others'.
            depth: exchanges that one program issues within each scope, at most.
            topology: groups the ranks otherwise than the machines do.
        """
        comm = self._comm if isinstance(self._comm, Communicator) else None
        made = Channel(comm, topology or self.topology, purpose, depth, self._fail)
        self._channels.append(made)
        return made

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._managed[0].parameter.device

    def probe(self, *, largest_bytes: int, seconds: float) -> Costs:
        """What exchanges cost on this network, measured on all ranks at once, or as the plan's pilot measured it.

        All ranks must call it.
        """
        if self._pilot is not None and self._pilot.costs is not None:
            return self._pilot.costs
        if not isinstance(self._comm, Communicator):
            return Costs({}, assumed_compute())
        from thinwire.measure.probe import probe

        group, device = self._comm.user_group, self._comm.device
        found = probe(group, self.topology, largest_bytes=largest_bytes, seconds=seconds, kernel_seconds=seconds / 4,
                      device=device)  # fmt: skip
        return found.costs

    def expect(self, names: Iterable[str]) -> None:
        """Say which parameters the next exchanged backward can give gradients to, at most. For one step; local.

        A bucket then starts when those of its parameters have arrived, and needs not wait for the end of backward where
        some are unused. A gradient of another parameter is an error.

        Raises:
            ValueError: an unknown name, or a decoupled method, which follows the order of the forward.
        """
        chosen = list(names)
        if unknown := [name for name in chosen if name not in self._by_name]:
            raise ValueError(f"expect() names {unknown[0]}, which is no trainable parameter of the model")
        if self._deferred is not None:
            raise ValueError("expect() is for methods that are not decoupled")
        self._expected = frozenset(self._by_name[name].index for name in chosen)

    def introduce(self, optimizers: Iterable[torch.optim.Optimizer], scaler: Any) -> None:
        """Tell optimizers that want to know (``attached(sync, scaler)``) whom they work with, until ``close``."""
        for optimizer in optimizers:
            if callable(meet := getattr(optimizer, "attached", None)):
                self._handles.append(meet(self, scaler))

    def agree(self, flag: bool) -> bool:
        """Whether any rank raises the flag; equal on all ranks."""
        if self._comm is None:
            return flag
        return any(row[0] for row in self._comm.gather(bytes([flag])))

    def agree_on(self, facts: dict[str, Any]) -> None:
        """Raise ``ValueError`` on all ranks, naming the difference, unless all bring the same facts (plain data)."""
        if self._comm is not None:
            self._comm.agree(facts)

    def stats(self) -> Stats:
        """Counters since ``attach``."""
        if self._comm is None:
            return Stats(self.method.name, self._settings.note, 1, self.state.step)
        phase = self.state.turn % len(self.plan.phases)
        buckets = tuple(
            BucketStats(
                entry.names,
                sum(self._by_name[name].parameter.numel() for name in entry.names),
                entry.dense,
                sum(step.sent_bytes for step in traced),
            )
            for entry, traced in zip(self.plan.phases[phase], self._traced[phase])
        )
        ledger = self._comm.ledger
        return Stats(
            method=self.method.name,
            note=self._settings.note,
            world_size=self.topology.world_size,
            steps=self.state.step,
            rejected_steps=self._rejected,
            dropped_steps=self._watch.dropped,
            bytes_sent=ledger.total,
            dense_bytes=self._dense_bytes,
            exposed_seconds=self._exposed + (self._deferred.exposed_seconds if self._deferred else 0.0),
            deferred_seconds=self._deferred.exposed_seconds if self._deferred else 0.0,
            rebuilt=self._rebuilt,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
            buckets=buckets,
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, flat: residuals under ``residual/<rank>/<name>``. No collective, but pending updates."""
        if self._deferred is not None:
            self._deferred.complete()
        return persistence.to_state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``: bit for bit at the same world size; the mean of the residuals at another.

        A single rank sends everything, so it pays nothing of what was owed: it keeps it, and ``state_dict`` hands it on
        until there are several ranks again. What is still kept when training ends has not reached the model.

        Raises:
            ValueError: it does not fit the model or the method, or lacks what this rank needs; nothing has changed.
        """
        if self._deferred is not None:
            self._deferred.complete()
        persistence.from_state_dict(self, state)

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one that measured times led to, or none was to be measured."""
        waiting = self._decision is not None
        return self._rebuilt and not waiting and (self._pilot is None or self._pilot.predicted is not None)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Recorder]:
        """Record the steps inside as Chrome-trace JSON (Perfetto opens it), on the lanes of ``thinwire plan --trace``.

        Example::

            with sync.trace(f"step.{rank}.json"):
                loss.backward()
        """
        recorder = Recorder()
        hooks = [
            self.model.register_forward_pre_hook(lambda *_: marks.__setitem__("forward", recorder.now())),
            self.model.register_forward_hook(lambda *_: self._forward_over(recorder, marks)),
        ]
        marks: dict[str, float] = {}
        self._recorder, self._marks = recorder, marks
        if self._comm is not None:
            self._comm.executor.recorder = recorder
        try:
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            self._recorder = None
            if self._comm is not None:
                self._comm.executor.recorder = None
            write_trace(path, recorder.events, self.rank, f"measured, {self.method.name}")

    @staticmethod
    def _forward_over(recorder: Recorder, marks: dict[str, float]) -> None:
        if "forward" in marks:
            recorder.add("forward", "compute", marks.pop("forward"))
            marks["backward"] = recorder.now()

    def adopt_plan(self, plan: Plan) -> None:
        """Put a plan in force from the next step on. All ranks must call it at the same step."""
        if self._running:
            raise RuntimeError("a plan can be adopted between steps only")
        plan.check(self._by_name)
        if self._deferred is not None:
            self._deferred.complete()
        self._rebuilt, self._decision = True, None
        if self._comm is not None:
            self._adopt(plan)
        else:
            self.plan = plan

    def close(self) -> None:
        """Take the hooks out, end the communicator thread, give the process groups back. Idempotent, local."""
        error = sys.exc_info()[1]
        if self._running and self._broken is None:
            self._broken = "it was closed in the middle of an exchange"
        if isinstance(self._comm, Communicator) and (self._running or error is not None):
            self._comm.leave(f"has left at step {self.state.step}" + (f" with {in_words(error)}" if error else ""))
        try:
            if self._deferred is not None:
                self._deferred.close(broken=self._broken is not None)
        finally:
            self._leave()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for companion in list(self.companions.values()):
            companion.close()
        self.companions.clear()
        for channel in self._channels:
            channel.close(broken=self._broken is not None)
        self._channels.clear()
        if self._comm is not None:
            self._comm.close(broken=self._broken is not None)
        self._watch.close()
        if attached_to(self.model) is self:
            del _attached[id(self.model)]

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
