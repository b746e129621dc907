"""``ddp_hook``: any method as a communication hook of ``DistributedDataParallel``.

DDP calls the hook in bucket order on every rank. Each bucket becomes one or two programs (what the method compresses,
and what it leaves to plain averaging), all advanced by one runner, so that every rank issues its collectives in one
order. DDP chooses the buckets and rebuilds them after the first backward, so all state is kept per parameter.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.core.checks import check_count
from thinwire.core.collectives.groups import backend_for, topology_of
from thinwire.core.methods.registry import resolve
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Bucket, Method, Program, Slot, State, Topology, working_dtype
from thinwire.core.program.trace import TracedExchange, steady_step, trace, with_rare_rounds
from thinwire.engine.attach import check_scaler, check_topology, checked_timeout
from thinwire.engine.local.settings import Local, named_local
from thinwire.engine.parameters import managed_parameters
from thinwire.engine.ranks.communicator import Communicator, SingleRank
from thinwire.engine.services import Closing
from thinwire.engine.session import Session
from thinwire.engine.state.persistence import VERSION, blank, from_flat, to_flat, warn_left_out
from thinwire.engine.stats import BucketStats, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Layout = list[tuple[tuple[str, ...], int, bool, str]]
"""For each program of a step: its parameter names, their elements, whether they stay dense, and the method's name."""
Hook = Callable[["DDPSync", "GradBucket"], "torch.futures.Future[Tensor]"]


def ddp_hook(
    method: Method | Local | str,
    *,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> tuple[DDPSync, Hook]:
    """Return state and hook for ``ddp_model.register_comm_hook(*ddp_hook("acp", rank=4))``; one pair per DDP model.

    Args:
        method: a name with its ``options``, or an instance. Buckets are DDP's, so ``fusion`` has no effect: set
            ``bucket_cap_mb``. A hook cannot distinguish embeddings from other matrices, nor know names:
            ``float32/0`` is the last registered float32 parameter, ``float32/1`` the one before, and so on.
        scaler: the GradScaler in use, so that residuals are kept in unscaled units. None: it is detected at its first
            ``scaler.step(optimizer)``.
        start_compression_step: as in :func:`thinwire.attach`.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's process groups.
        process_group: the group that was passed to DDP; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: the method's name or an option is unknown or out of range, its schedule is decoupled, or it is
            local steps.
    """
    if (local := named_local(method, options)) is not None:
        raise ValueError(
            "local steps exchange weights, but DDP gives its hook gradients: leave out DistributedDataParallel and "
            f"attach to the bare model, thinwire.attach(model, optimizer, {local!r})"
        )
    assert not isinstance(method, Local)
    chosen = resolve(method, **options)
    if chosen.decoupled:
        raise ValueError(
            f"{chosen.name} leaves part of its exchange to the next forward, but DDP wants all gradients at the end "
            "of backward: use thinwire.attach, or a method without decoupled=True"
        )
    limit = checked_timeout(timeout)
    check_scaler(scaler)
    check_topology(topology)
    if start_compression_step is not None:
        check_count("start_compression_step", start_compression_step, 0)
    return DDPSync(chosen, HookOptions(scaler, start_compression_step, limit, process_group, topology)), thinwire_hook


def thinwire_hook(state: DDPSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run the hook of :func:`ddp_hook`; at module level, so that DDP models can be pickled with it."""
    return state.exchange(bucket)


thinwire_hook.__annotations__.clear()  # DDP compares them with classes, and refuses strings


@dataclass(frozen=True)
class HookOptions:
    scaler: Any = None
    start: int | None = None
    timeout: timedelta | None = None
    process_group: dist.ProcessGroup | None = None
    topology: Topology | None = None


@dataclass(eq=False)
class _Job:  # one DDP bucket of the current step: done when its programs have ended
    buffer: Tensor
    promise: torch.futures.Future[Any]
    parts: list[Bucket] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class _Step:  # the buckets that DDP has passed in the current backward
    joined: bool
    jobs: list[_Job] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    layout: Layout = field(default_factory=list)
    last: int | None = None  # their number, once it is known
    ended: int = 0


class DDPSync(Closing):
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
        self._connected = False
        self._kept: dict[str, bool] = {}
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._traces: dict[tuple[tuple[str, ...], str], list[list[TracedExchange]]] = {}
        self._step = _Step(False)
        self._layouts: list[Layout] = []
        self._lock = threading.Lock()
        self._watched: dict[int, Any] = {}  # hooks that tell which parameters this rank uses in a backward
        self._used: set[int] = set()

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
                runs, SingleRank(), state, options.scaler, self._ordinals.names,
                start=options.start, named=self._method,
            )  # fmt: skip
            if self._saved is not None:
                saved, self._saved = self._saved, None
                self.load_state_dict(saved)
        return self._session

    @property
    def state(self) -> State:
        return self.session.state

    def _connect(self, device: torch.device) -> Communicator:
        """At the first bucket, make the lanes and compare the options across the ranks."""
        session = self.session
        if not self._connected:
            comm = Communicator(self._options.process_group, session.topology, device, self._options.timeout)
            comm.agree(session.facts())
            session.comm, self._connected = comm, True
            session.fit()
            comm.start()
            # Not returned to the pool: ranks collect garbage at different times, but must lease in one order.
            weakref.finalize(self, comm.close, broken=True)
        return session.comm

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
                self.session.watch.idle = set()
                self._step = _Step(has_joined)
                self.session.open(self._step.names, self._step.programs.__getitem__, self._failed)
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
        self._watch(names, parameters, last)
        job = _Job(buffer, promise_on(buffer.device))
        session = self.session
        plain = session.starting and session.first == session.dense
        kept = [plain or self._dense(name, p) for name, p in zip(names, parameters)]
        programs: list[int] = []
        for dense in (False, True):
            some = (row for row, keep in zip(zip(names, parameters, views), kept) if keep is dense)
            if slots := [Slot(name, p.shape, view, buffer.dtype, buffer.device, p) for name, p, view in some]:
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
            comm.executor.ready(index, last=last and index == programs[-1])
        failure = comm.executor.failure
        if failure is not None and self.session.broken is None and comm.backend == "nccl":
            self._failed()
        return result

    def _watch(self, names: Sequence[str], parameters: Sequence[Tensor], last: bool) -> None:
        """Find this rank's unused parameters: if no rank uses one, DDP drops its average; what is owed must stay."""
        for name, p in zip(names, parameters):
            if id(p) not in self._watched:
                hook = p.register_post_accumulate_grad_hook(lambda used: self._used.add(id(used)))
                self._watched[id(p)] = hook
            elif id(p) not in self._used:
                self.session.watch.idle.add(name)
        if last:
            self._used.clear()

    def _add(self, comm: Communicator, job: _Job, slots: Sequence[Slot], dense: bool) -> None:
        session, step = self.session, self._step
        names = tuple(slot.name for slot in slots)
        method = session.method_of(dense)
        if (key := (names, method.name)) not in self._traces:
            shapes, dtype = [(slot.name, slot.shape) for slot in slots], slots[0].dtype
            self._traces[key] = traced(method, shapes, session.topology, rank=session.rank, dtype=dtype)
            comm.open_lanes(self._traces[key])
        memory = joined(slots)
        if memory is None:
            if names not in self._buffers:
                self._buffers[names] = job.buffer.new_empty(sum(s.numel for s in slots))
            memory = self._buffers[names]
        part = Bucket(len(step.programs), slots, scale=session.scale, buffer=memory)
        job.parts.append(part)
        step.programs.append(self._to_the_end(method.reduce(part, session.state), job))
        step.names.append(list(names))
        step.layout.append((names, part.numel, dense, method.name))
        session.averaged(part.numel * job.buffer.element_size())

    def _dense(self, name: str, parameter: Tensor) -> bool:
        if name not in self._kept:
            self._kept[name] = self._method.dense(name, tuple(parameter.shape), False)
        return self._kept[name]

    def _to_the_end(self, program: Program, job: _Job) -> Program:
        yield from program
        job.left -= 1
        if job.left == 0:
            self._complete(job)

    # --- the end of a bucket, of a step; on the communicator thread (Gloo) ------------------------------------------

    def _complete(self, job: _Job) -> None:
        session, step = self.session, self._step
        if job.buffer.is_cuda:
            session.comm.executor.finish()  # this is the stream of one program; there are others
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
        failure = self.session.comm.executor.finish()
        text = self.session.sentence(failure) if failure else "the exchange failed"
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
        if self._session is not None:
            self._session.watch.names = self._ordinals.names
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
        found = self._options.process_group or dist.group.WORLD
        assert found is not None
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, flat: residuals under ``residual/<rank>/<name>``. No collective, no side effect."""
        kept, method, state = [(n, p) for n, p in self.names() if not self._dense(n, p)], self.session.named, self.state
        blanks = {} if method.shards else blank(method, kept, state.topology, state.rank)
        shapes = {name: tuple(p.shape) for name, p in kept}  # slices become whole: buckets are DDP's
        flat = to_flat(self.session, blanks, shapes)
        return flat | {"names": self._ordinals.source, "residuals": len(state.residuals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``: bit for bit at the same world size; the mean of the residuals at another.

        A single rank sends everything uncompressed, so it does not use up the residual: it keeps it, and ``state_dict``
        passes it on until there are several ranks again.

        Raises:
            ValueError: it belongs to another method, was not made by this hook, or lacks what this rank needs.
        """
        if state.get("version") != VERSION or state.get("names") not in ("ddp", "model"):
            raise ValueError(f"this is not the state of a thinwire DDP hook, version {VERSION}")
        if state["names"] != self._ordinals.source:
            raise ValueError(
                "the state and the hook name parameters differently: one is from ddp_hook, which counts them, the "
                "other from a framework's adapter, which knows their names; load the state where it was saved"
            )
        if state["residuals"] and not any(key.startswith("residual/") for key in state):
            raise ValueError(
                "the state has lost its residuals: DCP fills only what it is given, and a DDP hook knows no parameters "
                "before its first backward; load it after that, or save each rank's state_dict with torch.save"
            )
        self.state.restore(from_flat(self.session, state, None))
        self._ordinals.fit(self.state)

    def __reduce__(self) -> Any:
        saved = self.state_dict() if self._session is not None and self._ordinals.source == "ddp" else self._saved
        given = self._options
        return DDPSync, (self._method, HookOptions(None, given.start, given.timeout, None, given.topology), saved)

    def close(self) -> None:
        """End the communicator thread and return the process groups; the hook cannot be used afterwards."""
        for hook in self._watched.values():
            hook.remove()
        if self._session is not None and self._connected:
            self._session.close()


def _has_joined() -> bool:
    """Return whether DDP's ``Join`` calls for a rank without input: it does not step, but the others use its zeros."""
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
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


class Ordinals:
    """``float32/0`` is the last registered float32 parameter, ``float32/1`` the one before it.

    In its first backward, DDP presents the buckets of each dtype from last to first and the parameters of a bucket from
    first to last, whatever its ``bucket_cap_mb``. Later it uses its own order, and the names stay.
    """

    def __init__(self, known: Iterable[tuple[str, Tensor]] = ()) -> None:
        given = list(known)
        self.names: dict[int, str] = {id(p): name for name, p in given}
        self._parameters: list[Tensor] = [p for _, p in given]  # keeps the ids from being reused
        self._counts: dict[torch.dtype, int] = {}
        self._open = not given
        self.source = "model" if given else "ddp"

    def of(self, parameters: Sequence[Tensor], last: bool, state: State) -> list[str]:
        if self._open:
            for p in reversed(parameters):
                if id(p) not in self.names:
                    count = self._counts.get(p.dtype, 0)
                    self._counts[p.dtype] = count + 1
                    self.names[id(p)] = f"{str(p.dtype).removeprefix('torch.')}/{count}"
                    self._parameters.append(p)
                    _fit(self.names[id(p)], p, state)
            if last:
                self._open = False
                self._check(state)
        try:
            return [self.names[id(p)] for p in parameters]
        except KeyError:
            raise RuntimeError("this hook serves another DDP model already: call ddp_hook once for each") from None

    def items(self) -> list[tuple[str, Tensor]]:
        return [(self.names[id(p)], p) for p in self._parameters]

    def fit(self, state: State) -> None:
        for name, parameter in self.items():
            _fit(name, parameter, state)
        if not self._open:
            self._check(state)

    def _check(self, state: State) -> None:
        """Leave out state of parameters of which DDP has no gradients: frozen since it was saved."""
        extra = {*state.residuals, *(owner for _, owner in state.locals)} - set(self.names.values())
        warn_left_out(extra)
        for name in extra:
            state.residuals.pop(name, None)
        for key in [key for key in state.locals if key[1] in extra]:
            del state.locals[key]


def _fit(name: str, parameter: Tensor, state: State) -> None:
    if (loaded := state.residuals.get(name)) is not None:
        if loaded.shape != parameter.shape:
            raise ValueError(
                f"the state has a residual of shape {list(loaded.shape)} for {name} (numbers count from the last), "
                f"but the model's is {list(parameter.shape)}: it was saved by another model"
            )
        state.residuals[name] = loaded.to(parameter.device, working_dtype(parameter.dtype))
    for found, dtype in ((state.locals, working_dtype(parameter.dtype)), (state.fields, None)):
        found.update({key: x.to(parameter.device, dtype) for key, x in found.items() if key[1] == name})


def gradient_views(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients as DDP lays them out, in the parameters' strides. ``GradBucket.gradients`` ignores these."""
    if any(p.is_complex() for p in parameters):
        raise TypeError("the DDP model has a complex parameter; thinwire exchanges real floating-point gradients only")
    if sum(p.numel() for p in parameters) != buffer.numel():
        raise RuntimeError(
            "DDP's bucket holds more than its parameters' gradients; this version of torch is not supported"
        )
    views, start = [], buffer.storage_offset()
    for p in parameters:
        strides = p.stride() if _fills_its_memory(p) else torch.empty(p.shape, device="meta").stride()
        views.append(buffer.as_strided(p.shape, strides, start))
        start += p.numel()
    return views


def _fills_its_memory(x: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in some order of its axes."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def into_values(slots: Sequence[Slot]) -> None:
    for slot in slots:
        result, target = slot.result, slot.value
        assert target is not None
        if result is not None and not (result.data_ptr() == target.data_ptr() and result.stride() == target.stride()):
            target.copy_(result)


def joined(slots: Sequence[Slot]) -> Tensor | None:
    """Return the gradients as one 1-D tensor if they are consecutive and contiguous; else None."""
    first = slots[0].value_or_zeros()
    start = first.storage_offset()
    for slot in slots:
        value = slot.value_or_zeros()
        if not value.is_contiguous() or value.storage_offset() != start:
            return None
        start += slot.numel
    return first.as_strided((start - first.storage_offset(),), (1,), first.storage_offset())


def traced(
    method: Method,
    shapes: Sequence[tuple[str, Sequence[int]]],
    topology: Topology,
    *,
    rank: int,
    dtype: torch.dtype = torch.float32,
) -> list[list[TracedExchange]]:
    """Return a method's collectives in every phase, of a late step and of the first: all ranks open lanes for them."""
    steps = [*(steady_step(method, phase) for phase in range(method.phases)), *range(method.phases)]
    found = [trace(method, shapes, topology, rank=rank, step=step, dtype=dtype) for step in steps]
    return with_rare_rounds(method, found)


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which a group, by default all ranks, can exchange small tensors between steps."""
    cpu = torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if backend_for(cpu, group) is None else cpu


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    raised = torch.tensor([int(flag)], device=control_device(group))
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
    return bool(raised.item())
