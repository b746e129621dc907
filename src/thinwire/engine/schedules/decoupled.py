"""The decoupled schedule: shards wait for ``step()``, and updates for the layers that need them.

backward      reduce-scatters, then ``deliver``: the guard, and a ``DeferredGrad`` for each ``.grad``
step()        saves the hyper-parameters, issues all all-gathers in the order of need; each bucket is pending
forward       the first module that needs a bucket waits for it and updates its parameters, once

Because ``step()`` issues all all-gathers, completing what is pending needs nothing of the other ranks except that they
have called ``step()`` too.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.core.kernels.finite import each_finite
from thinwire.core.kernels.seeding import upload
from thinwire.core.methods.decoupling import Decoupling
from thinwire.core.program import Bucket
from thinwire.core.program.bucket import used_by_nobody
from thinwire.core.program.ops import Paused, own_modes
from thinwire.engine.buckets import Buckets
from thinwire.engine.hooks import ModuleHook, current_task
from thinwire.engine.parameters import ManagedParameter, gradient_dtype
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.schedules.coupled import Coupled, norm_dtype, powers_of, scaling, total_norm
from thinwire.engine.schedules.deferred import (
    DeferredGrad,
    DeferredUpdate,
    DeferredUpdates,
    OptimizerSnapshot,
    ParamGroupLock,
)

logger = logging.getLogger("thinwire")


class Decoupled(Coupled):
    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Decoupling,
        *,
        find_unused: bool,
    ) -> None:
        super().__init__(buckets, find_unused=find_unused)
        managed, self._options = buckets.managed, options
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
        self.readers = (
            [] if self._whole else [m for m in model.modules() if any(p.requires_grad for p in m.parameters())]
        )
        self._install(model, optimizers)

    def _see_compiled(self) -> None:
        if not self._whole and _compiled(self._forwards.model):
            self._whole = True
            logger.info("thinwire: the model is compiled, so its parameters are updated in optimizer.step()")

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        keep = self._handles.append
        for m in self._buckets.managed:
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
        m = self._buckets.managed[index]
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

    def before_forward(self, module: nn.Module) -> None:
        outside = current_task() == -1
        if outside:
            self._stale.clear()
        if self._forwards.learning and outside and module.training:
            self._forwards.called.setdefault(module)
        if not self._pending:
            return
        if not (module.training and torch.is_grad_enabled()):  # fast paths read weights without calling their modules
            self.complete()
            return
        assert self._shards is not None
        for index in self._forwards.reads.get(module, ()):
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
                        shards.gathering = True
                        self._session.comm.executor.resume(sorted(shards.paused, reverse=True), shards.inline)
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
                self._buckets.managed[index].parameter.grad = None
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
        for m in self._buckets.managed:
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
        session, shards = self._session, self._shards_of_step()
        self._shards, self.accumulated = shards, False
        started = time.perf_counter()
        used = [shards.memories[b].used[i] for b, i in shards.where] if self._find_unused else None
        finite: Callable[[], Tensor] | None = None
        if self._options.check_finite:
            finite, used = _guard(session.comm, [p.shard for p in shards.paused.values()], used)
        elif used is not None:
            everyone = session.comm.gather(bytes(used))
            used = [any(row[i] for row in everyone) for i in range(len(used))]
        for m, grad in zip(self._buckets.managed, self._grads):
            grad.renew(finite)
            if m.parameter.requires_grad:
                m.parameter.grad = grad if used is None or used[m.index] else None
        session.exposed_seconds += time.perf_counter() - started
        if finite is not None and session.method.has_residual:
            session.state.verdict(finite())
        session.commit()

    def _shards_of_step(self) -> DeferredUpdates:
        buckets, step = self._buckets, self._buckets.step
        where = [(0, 0)] * len(buckets.managed)
        for b, entry in enumerate(step.entries):
            for place, name in enumerate(entry.names):
                where[buckets.by_name[name].index] = b, place
        count = range(len(step.entries))
        memories, methods = [buckets.memory(b) for b in count], [buckets.method_of(b) for b in count]
        inline = [b for b in count if methods[b].cheap_pack or buckets.inline]
        return DeferredUpdates(memories, methods, self._session.comm.executor.paused, inline, where)

    def order(self) -> list[int] | None:
        """Return the reverse of the order of need, known after the first forward; None: it is not being learned."""
        return self._forwards.order()[::-1] if self._forwards.learning else None

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        shards, session = self._shards, self._session
        held = [m.parameter.grad for m in self._buckets.managed]
        deferred = [x for x in held if isinstance(x, DeferredGrad)]
        if shards is None or not deferred:
            return super().clip(max_norm, norm_type, error_if_nonfinite)
        parts: list[Tensor] = []
        for bucket, paused in sorted(shards.paused.items()):
            part = _delivered(paused, shards.memories[bucket].made, session.rank, session.state.size, norm_type)
            slots = [i for i, (b, _) in enumerate(shards.where) if b == bucket]
            changes = [x.changes for i in slots if isinstance(x := held[i], DeferredGrad)]
            if any(len(other) != len(changes[0]) for other in changes):
                raise RuntimeError("call clip_grad_norm_ after scaler.unscale_ of all optimizers")
            for change in changes[0] if changes else ():
                change([part])
            parts.append(part)
        own = powers_of(parts or [torch.zeros(1, device=session.comm.device)], norm_type, 1)
        sums = session.comm.gather_tensor(own).view(-1)
        kind = norm_dtype(gradient_dtype(m.parameter) for m in self._buckets.managed)
        norm = total_norm(sums, norm_type, kind, error_if_nonfinite)
        change = scaling(norm, max_norm)
        for grad in deferred:
            grad.changes.append(change)
        return norm

    def _complete_before(self, *_: Any) -> None:
        self.complete()

    # --- updates ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        return sorted(i for parts in self._pending.values() for part in parts for i in part.indices)

    def complete(self) -> None:
        for bucket in sorted(self._pending, reverse=True):
            self._update(bucket)

    def _update(self, bucket: int) -> None:
        self._receive(bucket)
        for part in self._pending.pop(bucket):
            with own_modes():
                for index in part.indices:
                    if self._poison is not None:
                        self._poison.take_out(index)
                self._fill(part.indices)
                managed = self._buckets.managed
                part.frozen.update({n: [managed[i].parameter for i in some] for n, some in part.groups.items()})
            for index in part.indices:
                self._buckets.managed[index].parameter.grad = None
        if not self._pending:
            self._settle()

    def _settle(self) -> None:
        assert self._shards is not None
        for bucket in self._shards.paused:
            self._receive(bucket)
        self._session.state.settle()

    def _receive(self, bucket: int) -> None:
        shards = self._shards
        assert shards is not None
        if bucket in shards.received or bucket not in shards.paused:
            return
        try:
            self._session.wait(bucket)
        except RuntimeError:
            self._pending.clear()
            raise
        shards.received.add(bucket)

    @torch.no_grad()
    def _fill(self, indices: Sequence[int]) -> None:
        shards = self._shards
        assert shards is not None
        wanted: dict[tuple[int, ...], tuple[list[Any], list[Tensor]]] = {}
        asked = {}
        for index in indices:
            bucket, place = shards.where[index]
            memory, slot = shards.memories[bucket], shards.memories[bucket].slots[place]
            if not memory.used[place] and shards.methods[bucket].sums(slot.shape):
                asked[index] = slot
        unused = used_by_nobody(asked)
        for index in indices:
            bucket, place = shards.where[index]
            memory, slot = shards.memories[bucket], shards.memories[bucket].slots[place]
            value = slot.value_or_zeros() if slot.result is None else slot.result
            grad = memory.gradients[place] if memory.gradients else value.data
            slot.value = slot.result = None
            if index in unused:
                self._buckets.managed[index].parameter.grad = None
                continue
            deferred = self._grads[index]
            if deferred.zeroed:
                grad.zero_()
            else:
                key = tuple(map(id, deferred.changes))
                wanted.setdefault(key, (deferred.changes, []))[1].append(grad)
            self._buckets.managed[index].parameter.grad = grad
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
            for m in self._buckets.managed:
                if isinstance(m.parameter.grad, DeferredGrad):
                    m.parameter.grad = None


class ForwardOrder:
    """Which parameters a module's forward reads, from the order in which modules are called.

    The parameters of a module that is never called go to the nearest enclosing module that is: ``MultiheadAttention``
    reads the weight of its ``out_proj`` without calling it. A shared parameter is read by all its owners.
    """

    def __init__(self, model: nn.Module, managed: Sequence[ManagedParameter], early: Iterable[int] = ()) -> None:
        self.model, self.index, self.early = model, {id(m.parameter): m.index for m in managed}, sorted(early)
        self.learning, index = True, self.index
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, []).append(name)
        self._own = {
            module: [index[id(p)] for p in module.parameters(recurse=False) if id(p) in index] for module in self._names
        }
        self.called: dict[nn.Module, None] = {}
        # Indices of the parameters that must be up to date when a module's forward begins.
        self.reads = {module: tuple(own) for module, own in self._own.items()}

    def order(self) -> list[int]:
        """Return all parameters in the order of need, and stop learning: those of modules never called go to others."""
        self.learning = False
        by_name = {name: module for module, names in self._names.items() for name in names}
        adopted: dict[nn.Module, list[int]] = {}
        orphans: list[int] = []
        for module, own in self._own.items():
            if not own or module in self.called:
                continue
            parents = {parent for name in self._names[module] if (parent := self._nearest(name, by_name)) is not None}
            for parent in parents:
                adopted.setdefault(parent, []).extend(own)
            if not parents:
                orphans.extend(own)
        if self.called:
            adopted.setdefault(next(iter(self.called)), []).extend(orphans)
        self.reads = {m: tuple(dict.fromkeys([*own, *adopted.get(m, ())])) for m, own in self._own.items()}
        wanted = [*self.early, *orphans, *(i for module in self.called for i in self.reads[module])]
        return list(dict.fromkeys([*wanted, *range(len(self.index))]))

    def _nearest(self, name: str, by_name: dict[str, nn.Module]) -> nn.Module | None:
        while name:
            name = name.rpartition(".")[0]
            if by_name[name] in self.called:
                return by_name[name]
        return None


def _guard(
    comm: Communicator, shards: Sequence[Tensor], used: Sequence[bool] | None
) -> tuple[Callable[[], Tensor], list[bool] | None]:
    """Gather a flag, whether this rank's parts are finite, and with ``used`` one bit per parameter; on all ranks.

    Only a caller of what is returned first waits for the flags (a 0-dim bool tensor), so all-gathers may begin before
    they have arrived. With ``used``, the host waits; what is returned second says which parameters any rank used.
    """
    finite = each_finite([*shards]).all() if shards else torch.ones((), dtype=torch.bool, device=comm.device)
    message = (~finite).to(torch.uint8).view(1)
    if used is not None:
        bits = torch.from_numpy(np.packbits(np.array(used, dtype=bool)))
        message = torch.cat([message, upload(bits, comm.device)])
    answer = functools.cache(comm.gather_later(message))
    anywhere = None
    if used is not None:
        rows = np.unpackbits(answer()[:, 1:].cpu().numpy(), axis=1, count=len(used))
        anywhere = [bool(x) for x in np.any(rows, axis=0).tolist()]
    return lambda: (answer()[:, 0] == 0).all(), anywhere


def _delivered(paused: Paused, bucket: Bucket | None, rank: int, ranks: int, norm_type: float) -> Tensor:
    """Return a copy of this rank's part of a scattered bucket, 1-D, as delivered but for scaler and clipping."""
    pause = paused.pause
    assert bucket is not None
    part: Tensor = paused.shard.to(bucket.dtype, copy=True)
    if pause.sums and norm_type != 2.0:
        raise ValueError(f"norm_type={norm_type}: for low-rank factors only the norm of type 2 equals the gradient's")
    if pause.sums:
        part[: max(0, pause.sums - rank * part.numel())] /= ranks
    if pause.unscaled and bucket.scale is not None:
        part *= bucket.scale
    return part


class _Poison:
    """With ``poison_stale=True``: keeps NaN in parameters until they are updated, so that a read too early shows."""

    def __init__(self, managed: Sequence[ManagedParameter]) -> None:
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


def _early(model: nn.Module, managed: Iterable[ManagedParameter], options: Decoupling) -> set[int]:
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
