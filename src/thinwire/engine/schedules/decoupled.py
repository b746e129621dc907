"""The decoupled schedule: shards wait for ``step()``, and updates for the layers that need them.

backward      reduce-scatters, then ``deliver``: the guard, and a ``DeferredGrad`` for each ``.grad``
step()        saves the hyper-parameters, issues all all-gathers in the order of need; each bucket is pending
forward       the first module that needs a bucket waits for it and updates its parameters, once

Because ``step()`` issues all all-gathers, completing what is pending needs nothing of the other ranks except that they
have called ``step()`` too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.core.methods.decoupling import Decoupling
from thinwire.core.program.bucket import used_by_nobody
from thinwire.core.program.ops import own_modes
from thinwire.engine.backward_end import current_task
from thinwire.engine.buckets import Buckets
from thinwire.engine.hooks import ModuleHook
from thinwire.engine.parameters import Managed, gradient_dtype
from thinwire.engine.schedules import clip, guard
from thinwire.engine.schedules.deferred_grad import DeferredGrad
from thinwire.engine.schedules.forward_order import ForwardOrder
from thinwire.engine.schedules.optimizers import OptimizerSnapshot, ParamGroupLock
from thinwire.engine.schedules.schedule import Schedule
from thinwire.engine.schedules.updates import DeferredUpdate, DeferredUpdates

logger = logging.getLogger("thinwire")


class Decoupled(Schedule):
    """The decoupled schedule of one attached model.

    Args:
        model: the root module.
        buckets: of its plan.
        optimizers: of its parameters.
        options: of the method.
        find_unused: whether to ask all ranks, before ``step()``, which parameters were used.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Decoupling,
        *,
        find_unused: bool,
    ) -> None:
        managed = buckets.parameters.managed
        self._buckets, self._options, self._find_unused = buckets, options, find_unused
        self._forwards = ForwardOrder(model, managed, _early(model, managed, options))
        self._whole = options.update_in_step is True  # all parameters are updated in ``step()``
        self._see_compiled()
        self._forwards.learning = not self._whole
        self._grads = [DeferredGrad(m.parameter) for m in managed]
        self._shards: DeferredUpdates | None = None
        self._pending: dict[int, list[DeferredUpdate]] = {}
        self._poison = _Poison(managed) if options.poison_stale else None
        self._stale: set[int] = set()  # parameters that were pending when a gradient came
        self._handles: list[Any] = []
        self._install(model, optimizers)

    def _see_compiled(self) -> None:
        if not self._whole and _compiled(self._forwards.model):
            self._whole = True
            logger.info("thinwire: the model is compiled, so its parameters are updated in optimizer.step()")

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        keep = self._handles.append
        for m in self._buckets.parameters.managed:
            keep(m.parameter.register_hook(partial(self._before_gradient, m.index)))
        for module in model.modules():
            keep(module.register_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(module.register_load_state_dict_pre_hook(ModuleHook(self._complete_before)))
        for optimizer in optimizers:
            keep(optimizer.register_step_pre_hook(self._before_step))
            keep(optimizer.register_step_post_hook(self._after_step))
            keep(optimizer.register_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(optimizer.register_load_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(ParamGroupLock(optimizer))

    def _before_gradient(self, index: int, gradient: Tensor) -> None:
        """Make pending updates when a gradient is about to be accumulated: the forward is over."""
        if self._pending:
            self._stale = {i for parts in self._pending.values() for part in parts for i in part.indices}
            self.complete()
        m = self._buckets.parameters.managed[index]
        if index in self._stale:
            module = m.name.rpartition(".")[0]
            raise RuntimeError(
                f"{m.name} was used before its update: something reads it without calling its module; attach with "
                f'update_in_step=("{module}",), so that it is updated in optimizer.step() (update_in_step=True for a '
                "compiled model)"
            )
        if gradient.layout is not torch.strided:
            raise TypeError(f"{m.name} received a sparse gradient, which thinwire does not exchange: use sparse=False")
        held = m.parameter.grad
        if isinstance(held, DeferredGrad):
            if not held.zeroed:
                _refuse_second()
            m.parameter.grad = None

    @property
    def readers(self) -> list[nn.Module]:
        return [] if self._whole else self._forwards.modules

    def before_forward(self, module: nn.Module) -> None:
        outside = current_task() == -1
        if outside:
            self._stale.clear()
        if self._forwards.learning and outside and module.training:
            self._forwards.called(module)
        if not self._pending:
            return
        if not (module.training and torch.is_grad_enabled()):  # fast paths read weights without calling their modules
            self.complete()
            return
        assert self._shards is not None
        for index in self._forwards.reads(module):
            bucket = self._shards.where[index][0]
            if bucket in self._pending:
                self._update(bucket)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise RuntimeError("step(closure) needs gradients at once: attach with decoupled=False")
        self._see_compiled()
        shards, frozen, index_of = self._shards, None, self._forwards.index
        parts: dict[int, DeferredUpdate] = {}
        if shards is None:
            return
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter.grad, DeferredGrad) and id(parameter) in index_of:
                    if not shards.gathering:
                        self._gather(shards)
                    index = index_of[id(parameter)]
                    frozen = frozen or OptimizerSnapshot(optimizer)
                    part = parts.setdefault(shards.where[index][0], DeferredUpdate(frozen, {}))
                    part.groups.setdefault(number, []).append(index)
        for bucket, part in parts.items():
            if self._whole:
                self._receive(bucket)
                self._fill(part.indices)
                continue
            for index in part.indices:
                self._buckets.parameters.managed[index].parameter.grad = None
                if self._poison is not None and index not in self._forwards.early:
                    self._poison.put(index)
            self._pending.setdefault(bucket, []).append(part)
        if self._whole and parts:
            self._settle()

    def _after_step(self, *_: Any) -> None:
        if self._shards is not None and self._pending:
            for bucket in dict.fromkeys(self._shards.where[index][0] for index in self._forwards.early):
                if bucket in self._pending:
                    self._update(bucket)

    # --- from backward to backward ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Drop what the last backward left, if nothing has used it."""
        for m in self._buckets.parameters.managed:
            held = m.parameter.grad
            if isinstance(held, DeferredGrad):
                if not held.zeroed:
                    _refuse_second()
                # Where updates are made in step(), gradients stay, so that weight decay sees zeros as in plain torch.
                m.parameter.grad = torch.zeros_like(m.parameter, dtype=held.dtype) if self._whole else None
        self.complete()
        self._shards, self.accumulated = None, False

    def deliver(self) -> None:
        """Check that all is finite, put a ``DeferredGrad`` in each ``.grad``, and commit. All reduce-scatters ended."""
        session, shards = self._buckets.session, self._shards_of_step()
        self._shards, self.accumulated = shards, False
        started = time.perf_counter()
        used = [shards.memories[b].used[i] for b, i in shards.where] if self._find_unused else None
        finite: Callable[[], Tensor] | None = None
        assert session.comm is not None
        if self._options.check_finite:
            verdict = guard.exchange(session.comm, [p.shard for p in shards.paused.values()], used)
            finite, used = verdict.finite, verdict.used
        elif used is not None:
            everyone = session.comm.gather(bytes(used))
            used = [any(row[i] for row in everyone) for i in range(len(used))]
        for m, grad in zip(self._buckets.parameters.managed, self._grads):
            grad.renew(finite)
            if m.parameter.requires_grad:
                m.parameter.grad = grad if used is None or used[m.index] else None
        session.counters.exposed_seconds += time.perf_counter() - started
        if finite is not None and session.method.has_residual:
            session.state.verdict(finite())
        session.commit()

    def _shards_of_step(self) -> DeferredUpdates:
        buckets, by_name = self._buckets, self._buckets.parameters.by_name
        step, comm = buckets.step, buckets.session.comm
        assert step is not None
        assert comm is not None
        where = [(0, 0)] * len(self._buckets.parameters.managed)
        for b, entry in enumerate(step.entries):
            for place, name in enumerate(entry.names):
                where[by_name[name].index] = b, place
        count = range(len(step.entries))
        inline = [b for b in count if buckets.method_of(b).cheap_pack or buckets.inline]
        memories, sums = [buckets.memory(b) for b in count], [buckets.method_of(b).sums for b in count]
        return DeferredUpdates(memories, comm.steps.executor.paused, inline, where, sums)

    def order(self) -> list[int] | None:
        """Return the reverse of the order of need, known after the first forward; None: it is not being learned."""
        return self._forwards.order()[::-1] if self._forwards.learning else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the sharded gradients by their norm over all ranks."""
        shards, session = self._shards, self._buckets.session
        held = [m.parameter.grad for m in self._buckets.parameters.managed]
        deferred = [x for x in held if isinstance(x, DeferredGrad)]
        if shards is None or not deferred:
            return clip.whole(self._buckets, max_norm, norm_type, error_if_nonfinite)
        assert session.comm is not None
        own = torch.zeros((), dtype=torch.float64, device=session.comm.device)
        for bucket, paused in sorted(shards.paused.items()):
            part = clip.delivered(paused, shards.bucket(bucket), session.rank, session.state.size, norm_type)
            slots = [i for i, (b, _) in enumerate(shards.where) if b == bucket]
            changes = [x.changes for i in slots if isinstance(x := held[i], DeferredGrad)]
            if any(len(other) != len(changes[0]) for other in changes):
                raise RuntimeError("call clip_grad_norm_ after scaler.unscale_ of all optimizers")
            for change in changes[0] if changes else ():
                change([part])
            own = clip.add(own, clip.power(part, norm_type), norm_type)
        sums = session.comm.gather_tensor(own.view(1)).view(-1)
        kind = clip.norm_dtype(gradient_dtype(m.parameter) for m in self._buckets.parameters.managed)
        norm = clip.total(sums, norm_type, kind, error_if_nonfinite)
        change = clip.scaling(norm, max_norm)
        for grad in deferred:
            grad.changes.append(change)
        return norm

    def _complete_before(self, *_: Any) -> None:
        self.complete()

    def _gather(self, shards: DeferredUpdates) -> None:
        comm = self._buckets.session.comm
        assert comm is not None
        shards.gathering = True
        comm.steps.executor.resume(sorted(shards.paused, reverse=True), shards.inline)

    # --- updates ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        return sorted(i for parts in self._pending.values() for part in parts for i in part.indices)

    def complete(self) -> None:
        """Make all pending updates. Local, except for the all-gathers that ``step()`` has issued."""
        for bucket in sorted(self._pending, reverse=True):
            self._update(bucket)

    def _update(self, bucket: int) -> None:
        """Receive a bucket and let each optimizer update its part."""
        self._receive(bucket)
        for part in self._pending.pop(bucket):
            with own_modes():
                for index in part.indices:
                    if self._poison is not None:
                        self._poison.take_out(index)
                self._fill(part.indices)
                managed = self._buckets.parameters.managed
                part.frozen.update({n: [managed[i].parameter for i in some] for n, some in part.groups.items()})
            for index in part.indices:
                self._buckets.parameters.managed[index].parameter.grad = None
        if not self._pending:
            self._settle()

    def _settle(self) -> None:
        """Keep what the programs' second halves have staged, once all updates are made."""
        assert self._shards is not None
        for bucket in self._shards.paused:
            self._receive(bucket)
        self._buckets.session.state.settle()

    def _receive(self, bucket: int) -> None:
        shards, session = self._shards, self._buckets.session
        assert shards is not None
        if bucket in shards.received or bucket not in shards.paused:
            return
        assert session.comm is not None
        started = time.perf_counter()
        failure = session.comm.steps.wait(bucket)
        session.counters.deferred_seconds += time.perf_counter() - started
        if failure:
            self._pending.clear()
            session.fail(failure)
        shards.received.add(bucket)

    @torch.no_grad()
    def _fill(self, indices: Sequence[int]) -> None:
        """Put received gradients into ``.grad``, changed as the scaler and clipping asked."""
        shards = self._shards
        assert shards is not None
        wanted: dict[tuple[int, ...], tuple[list[Any], list[Tensor]]] = {}
        asked = {}
        for index in indices:
            bucket, place = shards.where[index]
            memory, slot = shards.memories[bucket], shards.memories[bucket].slots[place]
            if not memory.used[place] and shards.sums[bucket](slot.shape):
                asked[index] = slot
        unused = used_by_nobody(asked)
        for index in indices:
            bucket, place = shards.where[index]
            memory, slot = shards.memories[bucket], shards.memories[bucket].slots[place]
            value = slot.raw() if slot.result is None else slot.result
            grad = memory.gradients[place] if memory.gradients else value.data
            slot.value = slot.result = None
            if index in unused:
                self._buckets.parameters.managed[index].parameter.grad = None
                continue
            deferred = self._grads[index]
            if deferred.zeroed:
                grad.zero_()
            else:
                key = tuple(map(id, deferred.changes))
                wanted.setdefault(key, (deferred.changes, []))[1].append(grad)
            self._buckets.parameters.managed[index].parameter.grad = grad
        for changes, gradients in wanted.values():
            for change in changes:
                change(gradients)

    def close(self, *, broken: bool) -> None:
        try:
            if not broken:
                self.complete()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for m in self._buckets.parameters.managed:
                if isinstance(m.parameter.grad, DeferredGrad):
                    m.parameter.grad = None


class _Poison:
    """With ``poison_stale=True``: keeps NaN in parameters until they are updated, so that a read too early shows."""

    def __init__(self, managed: Sequence[Managed]) -> None:
        self._managed = managed
        self._values: dict[int, Tensor] = {}

    @torch.no_grad()
    def put(self, index: int) -> None:
        parameter = self._managed[index].parameter
        self._values[index] = parameter.detach().clone()
        parameter.fill_(torch.nan)

    @torch.no_grad()
    def take_out(self, index: int) -> None:
        if (value := self._values.pop(index, None)) is not None:
            self._managed[index].parameter.copy_(value)


def _refuse_second() -> NoReturn:
    raise RuntimeError(
        "a second backward on top of deferred gradients: wrap all but the last in `with sync.no_sync():`, "
        "or call optimizer.step() or zero_grad() in between"
    )


def _early(model: nn.Module, managed: Iterable[Managed], options: Decoupling) -> set[int]:
    """Return the parameters of the modules named in ``update_in_step``."""
    if isinstance(options.update_in_step, bool):
        return set()
    modules = dict(model.named_modules())
    wanted: set[int] = set()
    for name in options.update_in_step:
        if name not in modules:
            raise ValueError(
                f"update_in_step: the model has no module {name!r}; it has {', '.join(filter(None, modules))}"
            )
        inside = {id(p) for p in modules[name].parameters()}
        wanted |= {m.index for m in managed if id(m.parameter) in inside}
    return wanted


def _compiled(model: nn.Module) -> bool:
    """Return whether some module was compiled by ``torch.compile``, whose code does not call our hooks."""
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or type(m).__name__ == "OptimizedModule"
        for m in model.modules()  # the present modules: a layer may have been replaced by its compiled form
    )
