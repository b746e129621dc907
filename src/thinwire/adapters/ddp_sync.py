"""The state of a DDP communication hook between steps: connects DDP's buckets, programs and state.

DDP calls the hook in bucket order on every rank. Each bucket becomes one or two programs (what the method compresses,
and what it leaves to plain averaging), all advanced by one runner, so that every rank issues its collectives in one
order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.adapters.ddp_group import any_rank
from thinwire.adapters.ddp_layout import gradient_views, into_values, joined
from thinwire.adapters.ddp_names import Ordinals
from thinwire.adapters.ddp_persistence import from_state_dict, to_state_dict
from thinwire.adapters.traced import traced
from thinwire.core.collectives.groups import topology_of
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Bucket, Method, Program, Slot, State, Topology
from thinwire.core.program.trace import TracedExchange
from thinwire.engine.parameters import managed_parameters
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.session import Session
from thinwire.engine.stats import BucketStats, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Layout = list[tuple[tuple[str, ...], int, bool, str]]
"""For each program of a step: its parameter names, their elements, whether they stay dense, and the method's name."""


@dataclass(frozen=True)
class HookOptions:
    """The options of ``ddp_hook`` that are not the method's."""

    scaler: Any = None
    start: int | None = None
    timeout: timedelta | None = None
    process_group: dist.ProcessGroup | None = None
    topology: Topology | None = None


@dataclass(eq=False)
class _Job:
    """One DDP bucket of the current step: done when its programs have ended."""

    buffer: Tensor
    promise: torch.futures.Future[Any]
    parts: list[Bucket] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class _Step:
    """The buckets that DDP has passed in the current backward. ``last``: their number, once it is known."""

    joined: bool
    jobs: list[_Job] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    layout: Layout = field(default_factory=list)
    last: int | None = None
    ended: int = 0


class DDPSync:
    """State of a DDP communication hook between steps. Made by :func:`~thinwire.ddp_hook`.

    When pickled, inside a DDP model or alone, it keeps its method and this rank's state, but neither the process group
    nor the scaler.

    Its dict is that of ``GradientSync`` (DCP's ``Stateful``), with ordinals as parameter names, or with the model's
    names after ``learn_names``.
    """

    def __init__(self, method: Method, options: HookOptions, saved: dict[str, Any] | None = None) -> None:
        self._method, self._options = method, options
        self._saved = saved  # state of the hook from which this one was unpickled
        self._session: Session | None = None
        self._note = ""
        self._ordinals = Ordinals()
        self._kept: dict[str, bool] = {}
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._traces: dict[tuple[tuple[str, ...], str], list[list[TracedExchange]]] = {}
        self._step = _Step(False)
        self._layouts: list[Layout] = []
        self._lock = threading.Lock()

    # --- where we are -------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The exchange, available once there is a process group."""
        if self._session is None:
            options = self._options
            here = dist.is_available() and dist.is_initialized()
            if not here and options.topology != Topology(1):
                raise RuntimeError("call torch.distributed.init_process_group before using the hook's state")
            world = dist.get_world_size(options.process_group) if here else 1
            topology = options.topology or topology_of(world)
            if topology.world_size != world:
                raise ValueError(f"the topology has {topology.world_size} ranks but the group has {world}")
            runs = self._method
            if world == 1:
                if not runs.exact:
                    self._note = f"one rank only: nothing is sent, so nothing is compressed; {runs.name} runs as ssgd"
                runs = SSGD()
            state = State(dist.get_rank(options.process_group) if here else 0, topology)
            self._session = Session(
                runs, None, state, options.scaler, lambda: self._ordinals.names,
                start=options.start, named=self._method,
            )  # fmt: skip
            if self._saved is not None:
                saved, self._saved = self._saved, None
                self.load_state_dict(saved)
        return self._session

    @property
    def state(self) -> State:
        """The method's state, by ordinal name."""
        return self.session.state

    def _connect(self, device: torch.device) -> Communicator:
        """At the first bucket, make the lanes and compare the options across the ranks."""
        session = self.session
        if session.comm is None:
            comm = Communicator(self._options.process_group, session.topology, device, self._options.timeout)
            comm.agree(session.facts())
            session.comm = comm
            session.fit()
            comm.start()
            # Not returned to the pool: ranks collect garbage at different times, but must lease in one order.
            weakref.finalize(self, comm.close, broken=True)
        assert isinstance(session.comm, Communicator)
        return session.comm

    # --- one bucket ---------------------------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Pass one of DDP's buckets to the runner. The future's value is the average, in the bucket's own memory."""
        buffer, alone = bucket.buffer(), self.state.size == 1
        has_joined = _has_joined() if bucket.index() == 0 else False
        if bucket.index() > 0 and not alone and bucket.index() != len(self._step.jobs):
            raise RuntimeError(
                "DDP has left out a bucket, and a hook cannot know which ranks to wait for: use thinwire.ddp_hook "
                "without skip_all_reduce_unused_params=True"
            )
        if buffer.is_sparse:
            raise TypeError("DDP delivers a sparse gradient; use Embedding(sparse=False) with thinwire.ddp_hook")
        with torch.no_grad():
            if alone:
                return self._alone(bucket, buffer)
            comm = self._connect(buffer.device)
            if bucket.index() == 0:
                self.session.begin()
                self._step = _Step(has_joined)
                comm.steps.begin_open(self.state.step, self._step.names, self._step.programs.__getitem__, self._failed)
            return self._submit(comm, bucket, buffer)

    def _alone(self, bucket: GradBucket, buffer: Tensor) -> torch.futures.Future[Tensor]:
        self._ordinals.of(bucket.parameters(), bucket.is_last(), self.state)
        if bucket.is_last():
            self.state.step += 1
        done: torch.futures.Future[Tensor] = promise_on(buffer.device)
        done.set_result(buffer)
        return done

    def _submit(self, comm: Communicator, bucket: GradBucket, buffer: Tensor) -> torch.futures.Future[Tensor]:
        parameters, last, step = bucket.parameters(), bucket.is_last(), self._step
        names = self._ordinals.of(parameters, last, self.state)
        views = gradient_views(buffer, parameters)
        job = _Job(buffer, promise_on(buffer.device))
        session = self.session
        plain = session.starting and session.first == session.dense
        kept = [plain or self._dense(name, p) for name, p in zip(names, parameters)]
        programs: list[int] = []
        for dense in (False, True):
            slots = [
                Slot(name, p.shape, view, buffer.dtype, buffer.device, p)
                for name, p, view, keep in zip(names, parameters, views, kept)
                if keep is dense
            ]
            if slots:
                programs.append(len(step.programs))
                self._add(comm, job, slots, dense)
        job.left = len(programs)
        result = job.promise.then(self._value)
        with self._lock:
            if self.session.broken is not None:
                raise RuntimeError(self.session.broken)
            step.jobs.append(job)
        if last:
            step.last = len(step.jobs)
        for index in programs:
            comm.steps.executor.ready(index, last=last and index == programs[-1])
        failure = comm.steps.executor.failure
        if failure is not None and self.session.broken is None and comm.backend == "nccl":
            self._failed()
        return result

    def _add(self, comm: Communicator, job: _Job, slots: Sequence[Slot], dense: bool) -> None:
        """Add one program: its lanes, its bucket, its place in the step."""
        session, step = self.session, self._step
        names = tuple(slot.name for slot in slots)
        method = session.method_of(dense)
        key = (names, method.name)
        if key not in self._traces:
            shapes = [(slot.name, slot.shape) for slot in slots]
            dtype = slots[0].dtype
            self._traces[key] = traced(method, shapes, session.topology, rank=session.rank, dtype=dtype)
            comm.open_lanes(self._traces[key])
        memory = joined(slots)
        if memory is None:
            if names not in self._buffers:
                self._buffers[names] = job.buffer.new_empty(sum(s.numel for s in slots))
            memory = self._buffers[names]
        part = Bucket(len(step.programs), slots, scale=session.loss_scale.now, buffer=memory)
        job.parts.append(part)
        step.programs.append(self._to_the_end(method.reduce(part, session.state), job))
        step.names.append(list(names))
        step.layout.append((names, part.numel, dense, method.name))
        session.counters.sent(part.numel * job.buffer.element_size(), session.state.size)

    def _dense(self, name: str, parameter: Tensor) -> bool:
        """Return whether the method leaves a parameter to plain averaging."""
        known = self._kept.get(name)
        return self._method.dense(name, tuple(parameter.shape), False) if known is None else known

    def _to_the_end(self, program: Program, job: _Job) -> Program:
        yield from program
        job.left -= 1
        if job.left == 0:
            self._complete(job)

    # --- the end of a bucket, of a step; on the communicator thread (Gloo) ------------------------------------------

    def _complete(self, job: _Job) -> None:
        session, step = self.session, self._step
        if job.buffer.is_cuda:
            assert session.comm is not None
            session.comm.steps.finish()  # this is the stream of one program; there are others
        for part in job.parts:
            into_values(part.slots)
        step.ended += 1
        if step.ended == step.last:
            session.commit(used=not step.joined)
            if not self._layouts or self._layouts[-1] != step.layout:
                self._layouts = [*self._layouts[:1], step.layout]
        job.promise.set_result(job.buffer)

    def _failed(self) -> None:
        """Make every bucket that DDP waits for raise, with the reason, after a program or collective raised."""
        comm = self.session.comm
        assert comm is not None
        text = comm.steps.finish() or "the exchange failed"
        with self._lock:
            self.session.give_up(text)
            waiting = [job for job in self._step.jobs if not job.promise.done()]
        for job in waiting:
            job.promise.set_result(None)

    def _value(self, promise: torch.futures.Future[Any]) -> Tensor:
        """Return the value, or raise inside ``then``: DDP does not handle a future's own ``set_exception``."""
        value = promise.value()
        if value is None:
            raise RuntimeError(self.session.broken)
        assert isinstance(value, Tensor)
        return value

    # --- what users call ----------------------------------------------------------------------------------------

    def learn_names(self, model: nn.Module) -> None:
        """Use the model's own parameter names and modules, as ``attach`` does; before the first backward.

        For callers that have the model. Seeds, dense parameters and names in ``state_dict`` are then those of
        ``attach``.

        Args:
            model: the module inside DDP.

        Raises:
            TypeError: a parameter that thinwire cannot exchange: complex, or with sparse gradients.
        """
        managed = managed_parameters(model, self._method, "auto")
        self._ordinals = Ordinals((m.name, m.parameter) for m in managed)
        self._kept = {m.name: m.dense for m in managed}

    def names(self) -> list[tuple[str, Tensor]]:
        """Return names and parameters; empty before the first backward, unless ``learn_names`` was called."""
        return self._ordinals.items()

    def stats(self) -> Stats:
        """Return the counters since the start. DDP waits in C++, so ``exposed_seconds`` is unknown here and stays 0."""
        phase = self.state.turn % self.session.method.phases
        buckets = []
        for names, elements, dense, method in self._layouts[-1] if self._layouts else ():
            found = self._traces[names, method]
            sent = sum(step.sent_bytes for step in found[phase if method == self.session.method.name else 0])
            buckets.append(BucketStats(names, elements, dense, sent))
        return self.session.stats(self._note, buckets, rebuilt=len(self._layouts) > 1)

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raises the flag; equal on all ranks. Call it between steps only."""
        return flag if self.state.size == 1 else any_rank(flag, self._options.process_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """DDP's process group."""
        found = self._options.process_group or dist.group.WORLD
        assert found is not None
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, flat: residuals under ``residual/<rank>/<name>``. No collective, no side effect."""
        kept = [(name, p) for name, p in self.names() if not self._dense(name, p)]
        return to_state_dict(self.session, kept, self._ordinals.source)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``: bit for bit at the same world size; the mean of the residuals at another.

        A single rank sends everything uncompressed, so it does not use up the residual: it keeps it, and ``state_dict``
        passes it on until there are several ranks again.

        Raises:
            ValueError: it belongs to another method, was not made by this hook, or lacks what this rank needs.
        """
        from_state_dict(self.session, state, self._ordinals.source)
        self._ordinals.fit(self.state)

    def __reduce__(self) -> Any:
        saved = self.state_dict() if self._session is not None and self._ordinals.source == "ddp" else self._saved
        given = self._options
        return DDPSync, (self._method, HookOptions(None, given.start, given.timeout, None, given.topology), saved)

    def close(self) -> None:
        """End the communicator thread and return the process groups; the hook cannot be used afterwards."""
        if self._session is not None and self._session.comm is not None:
            self._session.close()

    def __enter__(self) -> DDPSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _has_joined() -> bool:
    """Return whether DDP's ``Join`` calls for a rank without input: it does not step, but the others use its zeros.

    Raises:
        RuntimeError: the others use another divisor, which hooks are not told.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        joined = frame.f_code.co_name == "_match_all_reduce_for_bwd_pass"
        if joined and not getattr(frame.f_locals["self"], "_divide_by_initial_world_size", True):
            raise RuntimeError(
                "join(divide_by_initial_world_size=False) has no effect on a communication hook, which divides by "
                "all ranks: use the default, divide_by_initial_world_size=True, or no hook"
            )
        if joined:
            return True
    return False


def promise_on(device: torch.device) -> torch.futures.Future[Any]:
    """Return a future for tensors of this device."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
