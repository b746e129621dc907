"""Ties DDP's buckets, programs and state together, step by step.

DDP calls the hook in bucket order on every rank. Each bucket becomes one or two programs (what the method compresses,
what it leaves to plain averaging), all advanced by one runner, so that every rank issues its collectives in one order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.adapters.ddp_layout import gradient_views, joined
from thinwire.adapters.ddp_names import Ordinals
from thinwire.adapters.traced import traced
from thinwire.collectives.topology import topology_of
from thinwire.engine.communicator import Communicator
from thinwire.engine.restart import tell_reset
from thinwire.engine.scaler import found_scaler, loss_scale
from thinwire.engine.step_watch import StepWatch, owned
from thinwire.methods.ssgd import SSGD
from thinwire.program import Bucket, Method, Program, Slot, State, Topology
from thinwire.program.trace import Step

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


@dataclass(eq=False)
class _Job:
    """One DDP bucket of the step that is running: done when its programs have ended."""

    buffer: Tensor
    promise: torch.futures.Future[Any]
    parts: list[Bucket] = field(default_factory=list)
    left: int = 0


class DDPSteps:
    """The machinery of :class:`~thinwire.adapters.ddp.DDPSync`, which adds what users call."""

    def __init__(
        self,
        method: Method,
        scaler: Any,
        start: int | None,
        timeout: timedelta | None,
        group: dist.ProcessGroup | None,
        topology: Topology | None,
    ) -> None:
        self.method = method
        self._named = method  # whose state is kept, where one rank runs S-SGD in its stead
        self._dense: Method = method.beside() or SSGD(ordered=method.ordered)
        self._scaler, self._timeout, self._group, self._given = scaler, timeout, group, topology
        self._start = start
        self._saved: dict[str, Any] | None = None  # of the hook that this one was unpickled from
        self._watch = StepWatch(
            lambda: self._state, lambda: self._ordinals.names, expected=False, before=self._before_step
        )
        self._state: State | None = None
        self._comm: Communicator | None = None
        self._note = ""
        self._ordinals = Ordinals()
        self._kept: dict[str, bool] = {}
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._traces: dict[tuple[tuple[str, ...], bool], list[list[Step]]] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._running = False
        self._scale: Tensor | None = None
        self._jobs: list[_Job] = []
        self._programs: list[Program] = []
        self._program_names: list[list[str]] = []
        self._last: int | None = None
        self._joined = False
        self._ended = 0
        self._layout: list[tuple[tuple[str, ...], int, bool]] = []
        self._layouts: list[list[tuple[tuple[str, ...], int, bool]]] = []
        self._rejected, self._dense_bytes = 0, 0.0

    # --- where we are -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The method's memory, by ordinal name."""
        if self._state is None:
            here = dist.is_available() and dist.is_initialized()
            if not here and self._given != Topology(1):
                raise RuntimeError("call torch.distributed.init_process_group before using the hook's state")
            world = dist.get_world_size(self._group) if here else 1
            topology = self._given or topology_of(world)
            if topology.world_size != world:
                raise ValueError(f"the topology has {topology.world_size} ranks but the group has {world}")
            if world == 1:
                if not self.method.exact:
                    ran = self.method.name
                    self._note = f"one rank only: nothing is sent, so nothing is compressed; {ran} runs as ssgd"
                self.method = SSGD()
            self._state = State(dist.get_rank(self._group) if here else 0, topology)
            self._state.start = self.method.exact_start if self._start is None else self._start
        return self._state

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.state.rank

    @property
    def topology(self) -> Topology:
        """Which rank sits where."""
        return self.state.topology

    def _connect(self, device: torch.device) -> Communicator:
        """At the first bucket: make the lanes and compare the options over the ranks."""
        if self._comm is None:
            comm = Communicator(self._group, self.topology, device, self._timeout)
            comm.agree({"method": self.method.name, "options": self._options(), "start": self.state.start})
            comm.start()
            # Not handed back to the pool: ranks collect garbage at different times, but lease in one order.
            weakref.finalize(self, comm.close, broken=True)
            self._comm = comm
        return self._comm

    def _options(self) -> dict[str, str]:
        return {key: str(value) for key, value in self.method.options().items()}

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step."""
        if self._scaler is not None or self._comm is None or not self.method.has_residual:
            return
        if owned(optimizer, self._ordinals.names):
            self._scaler = found_scaler(self.state, self._comm.device)

    # --- one bucket ---------------------------------------------------------------------------------------------

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand one of DDP's buckets to the runner. The future's value is the average, in the bucket's own memory."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._joined = _has_joined()
        elif self.state.size > 1 and bucket.index() != len(self._jobs):
            raise RuntimeError(
                "DDP has left out a bucket, and a hook cannot know for whom to wait: use thinwire.ddp_hook without "
                "skip_all_reduce_unused_params=True"
            )
        if buffer.is_sparse:
            raise TypeError("DDP brings a sparse gradient; use Embedding(sparse=False) with thinwire.ddp_hook")
        with torch.no_grad():
            if self.state.size == 1:
                return self._alone(bucket, buffer)
            comm = self._connect(buffer.device)
            if bucket.index() == 0:
                self._begin(comm)
            return self._submit(comm, bucket, buffer)

    def _alone(self, bucket: GradBucket, buffer: Tensor) -> torch.futures.Future[Tensor]:
        self._ordinals.of(bucket.parameters(), bucket.is_last(), self.state)
        if bucket.is_last():
            self.state.step += 1
        done: torch.futures.Future[Tensor] = _promise(buffer.device)
        done.set_result(buffer)
        return done

    def _begin(self, comm: Communicator) -> None:
        if self._running and self._broken is None:
            self._broken = "an earlier backward ended with an exception in the middle of the exchange"
        if self._broken is not None:
            raise RuntimeError(f"this DDP hook is unusable after an earlier failure: {self._broken}")
        self._watch.begin()
        tell_reset(self.method, self.state)
        self._running, self._last, self._ended = True, None, 0
        self._jobs, self._programs, self._program_names, self._layout = [], [], [], []
        self._scale = loss_scale(self._scaler, comm.device)
        self.state.lr = None
        comm.begin_open(self.state.step, self._program_names, self._program, self._failed)

    def _submit(self, comm: Communicator, bucket: GradBucket, buffer: Tensor) -> torch.futures.Future[Tensor]:
        parameters = bucket.parameters()
        last = bucket.is_last()
        names = self._ordinals.of(parameters, last, self.state)
        views = gradient_views(buffer, parameters)
        job = _Job(buffer, _promise(buffer.device))
        exact = self.state.step < self.state.start
        kept = [exact or self._dense_here(name, p) for name, p in zip(names, parameters)]
        programs: list[int] = []
        for dense in (False, True):
            slots = [
                Slot(name, p.shape, view, buffer.dtype, buffer.device, p)
                for name, p, view, keep in zip(names, parameters, views, kept)
                if keep is dense
            ]
            if slots:
                programs.append(len(self._programs))
                self._add(comm, job, slots, dense)
        job.left = len(programs)
        result = job.promise.then(self._value)
        with self._lock:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            self._jobs.append(job)
        if last:
            self._last = len(self._jobs)
        for index in programs:
            comm.executor.ready(index, last=last and index == programs[-1])
        failure = comm.executor.failure
        if failure is not None and self._broken is None and comm.backend == "nccl":
            self._failed()
        return result

    def _add(self, comm: Communicator, job: _Job, slots: Sequence[Slot], dense: bool) -> None:
        """One program: its lanes, its bucket, its place in the step."""
        names = tuple(slot.name for slot in slots)
        method = self._dense if dense else self.method
        key = (names, dense)
        if key not in self._traces:
            shapes = [(slot.name, slot.shape) for slot in slots]
            self._traces[key] = traced(method, shapes, self.topology, rank=self.rank, dtype=slots[0].dtype)
            comm.open_lanes(self._traces[key])
        memory = joined(slots)
        if memory is None:
            if names not in self._buffers:
                self._buffers[names] = job.buffer.new_empty(sum(s.numel for s in slots))
            memory = self._buffers[names]
        part = Bucket(len(self._programs), slots, scale=self._scale, buffer=memory)
        job.parts.append(part)
        self._programs.append(self._to_the_end(method.reduce(part, self.state), job))
        self._program_names.append(list(names))
        self._layout.append((names, part.numel, dense))
        self._dense_bytes += 2 * (self.state.size - 1) / self.state.size * part.numel * job.buffer.element_size()

    def _dense_here(self, name: str, parameter: Tensor) -> bool:
        """Whether the method leaves a parameter to plain averaging."""
        known = self._kept.get(name)
        return self._named.dense(name, tuple(parameter.shape), False) if known is None else known

    def _program(self, index: int) -> Program:
        return self._programs[index]

    def _to_the_end(self, program: Program, job: _Job) -> Program:
        yield from program
        job.left -= 1
        if job.left == 0:
            self._complete(job)

    # --- the end of a bucket, of a step; on the communicator thread (Gloo) ------------------------------------------

    def _complete(self, job: _Job) -> None:
        if job.buffer.is_cuda:
            assert self._comm is not None
            self._comm.executor.finish()  # this is the stream of one program, and there are others
        for part in job.parts:
            for slot in part.slots:
                result, target = slot.result, slot.value
                assert target is not None
                if result is not None and not (
                    result.data_ptr() == target.data_ptr() and result.stride() == target.stride()
                ):
                    target.copy_(result)
        self._ended += 1
        if self._ended == self._last:
            self._commit(job.buffer)
        job.promise.set_result(job.buffer)

    def _commit(self, like: Tensor) -> None:
        hold = self._watch.hold and not self._joined
        if like.is_cuda:
            self.state.end_step_on_device(hold=hold)
        elif not self.state.end_step(hold=hold):
            self._rejected += 1
        self._watch.delivered()
        if not self._layouts or self._layouts[-1] != self._layout:
            self._layouts = [*self._layouts[:1], self._layout]
        self._running = False

    def _failed(self) -> None:
        """Some program or collective raised: every bucket that DDP waits for raises, with the reason."""
        assert self._comm is not None
        text = self._comm.finish() or "the exchange failed"
        with self._lock:
            self._broken = text
            waiting = [job for job in self._jobs if not job.promise.done()]
        self.state.drop_step()
        for job in waiting:
            job.promise.set_result(None)

    def _value(self, promise: torch.futures.Future[Any]) -> Tensor:
        """A future's own ``set_exception`` is not understood by DDP; an exception in ``then`` is."""
        value = promise.value()
        if value is None:
            raise RuntimeError(self._broken)
        assert isinstance(value, Tensor)
        return value


def _has_joined() -> bool:
    """Whether DDP's ``Join`` calls for a rank that has no more input: it does not step, but the others use its zeros.

    Raises:
        RuntimeError: the others want another divisor, of which hooks are not told.
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


def _promise(device: torch.device) -> torch.futures.Future[Any]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)
