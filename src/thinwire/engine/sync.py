"""GradientSync: what ``attach`` returns, and what users call on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from thinwire.engine import persistence
from thinwire.engine.agreement import gather_bytes
from thinwire.engine.recorder import Recorder
from thinwire.engine.stats import BucketStats, Stats
from thinwire.engine.steps import ATTACHED, Settings, Steps
from thinwire.planner.timeline import write_trace
from thinwire.program import Plan, Program

__all__ = ["ATTACHED", "GradientSync", "Settings"]


class GradientSync(Steps):
    """Averages a model's gradients over ranks while backward runs. Made by :func:`thinwire.attach`.

    After ``backward()`` has returned, ``.grad`` holds the average.
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
        """After passes that were all ``no_sync``: reduce what has been accumulated. All ranks must call it."""
        if self._comm is not None and self._enabled and not self._running:
            self._begin()
            self._rebuilt, before = True, self._rebuilt
            self._finish()
            self._rebuilt = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the averaged gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``. Returns the norm."""
        parameters = [m.parameter for m in self._managed]
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def run(self, program: Program, *, lane: str = "control") -> Any:
        """Run a program on tensors that are not parameters, now, in the calling thread, on lanes of its own.

        All ranks must call it at the same point with programs that issue the same ops. Returns the program's value.
        """
        if self._comm is not None:
            return self._comm.run(program, lane)
        from thinwire.engine.alone import run_alone

        return run_alone(program)

    def agree(self, flag: bool) -> bool:
        """Whether any rank raises the flag; equal on all ranks."""
        if self._comm is None:
            return flag
        return any(row[0] for row in gather_bytes(bytes([flag]), self._comm.control, self._comm.device))

    def stats(self) -> Stats:
        """Counters since ``attach``."""
        if self._comm is None:
            return Stats(self.method.name, self._settings.note, 1, self.state.step)
        phase = self.state.step % len(self.plan.phases)
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
            bytes_sent=ledger.total,
            dense_bytes=self._dense_bytes,
            exposed_seconds=self._exposed,
            rebuilt=self._rebuilt,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
            buckets=buckets,
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, flat: residuals under ``residual/<rank>/<name>``. No collective, no side effect."""
        return persistence.to_state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``: bit for bit at the same world size; the mean of the residuals at another.

        Raises:
            ValueError: it does not fit the model, or lacks what this rank needs.
        """
        persistence.from_state_dict(self, state)

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one that measured times led to, or none was to be measured."""
        return self._rebuilt and (self._pilot is None or self._pilot.predicted is not None)

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
        self._rebuilt = True
        if self._comm is not None:
            self._adopt(plan)
        else:
            self.plan = plan

    def detach(self) -> None:
        """Take the hooks out, end the communicator thread, give the process groups back. Idempotent, local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._comm is not None:
            self._comm.close(broken=self._broken is not None)
        if getattr(self.model, ATTACHED, None) is self:
            object.__delattr__(self.model, ATTACHED)

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()
