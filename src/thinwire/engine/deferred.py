"""The second half of a decoupled step: shards wait for ``step()``, updates for the layers that need them.

backward      reduce-scatters, then ``take``: the guard, and a ``DeferredGrad`` for each ``.grad``
step()        hyper-parameters are frozen, all all-gathers issued in need order, every bucket is pending
forward       the first module that needs a bucket waits for it and updates its parameters, once

All all-gathers are issued in ``step()``, so completing what is pending needs nothing of the other ranks but that they
have called ``step()`` too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.engine import clip, guard
from thinwire.engine.alone import Alone
from thinwire.engine.backward_end import current_task
from thinwire.engine.communicator import Communicator
from thinwire.engine.deferred_grad import DeferredGrad
from thinwire.engine.hooks import ModuleHook
from thinwire.engine.need import Need
from thinwire.engine.parameters import Managed
from thinwire.engine.partial import Closed, Frozen
from thinwire.engine.shards import Part, Shards
from thinwire.methods.decoupling import Decoupling
from thinwire.program import State
from thinwire.program.bucket import used_by_nobody

logger = logging.getLogger("thinwire")


class Deferred:
    """Of one GradientSync whose method is decoupled.

    Args:
        model: the root.
        managed: its trainable parameters.
        optimizers: that own them.
        communicator: of the ranks.
        state: of the method.
        options: of the schedule.
        fail: puts the GradientSync out of use with a sentence; raises.
    """

    def __init__(
        self,
        model: nn.Module,
        managed: list[Managed],
        optimizers: Sequence[torch.optim.Optimizer],
        communicator: Communicator | Alone,
        state: State,
        options: Decoupling,
        fail: Callable[[str], NoReturn],
    ) -> None:
        self._managed, self._comm, self._state, self._fail = managed, communicator, state, fail
        self._options = options
        self._index = {id(m.parameter): m.index for m in managed}
        self._early = _early(model, managed, options)
        self._model, self._whole = model, options.eager is True
        self._see_compiled()
        self._grads = [DeferredGrad(m.parameter) for m in managed]
        self._need = Need(model, managed, sorted(self._early))
        self._learning = not self._whole
        self._shards: Shards | None = None
        self._pending: dict[int, list[Part]] = {}
        self._old: dict[int, Tensor] = {}  # with check=True: values of parameters that are NaN for the time being
        self._stale: set[int] = set()
        self.accumulated = False  # gradients that have not been reduced
        self._handles: list[Any] = []
        self.exposed_seconds = 0.0
        self._install(model, optimizers)

    def _see_compiled(self) -> None:
        if not self._whole and _compiled(self._model):
            self._whole = True
            logger.info("thinwire: the model is compiled, so its parameters are updated in optimizer.step()")

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        keep = self._handles.append
        for m in self._managed:
            keep(m.parameter.register_hook(partial(self._before_gradient, m.index)))
        for module in model.modules():
            keep(module.register_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(module.register_load_state_dict_pre_hook(ModuleHook(self._complete_before)))
        for optimizer in optimizers:
            keep(optimizer.register_step_pre_hook(self._before_step))
            keep(optimizer.register_step_post_hook(self._after_step))
            keep(optimizer.register_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(optimizer.register_load_state_dict_pre_hook(ModuleHook(self._complete_before)))
            keep(Closed(optimizer))

    def _before_gradient(self, index: int, gradient: Tensor) -> None:
        """A gradient is about to be accumulated: the forward phase is over."""
        if self._pending:
            self._stale = {i for parts in self._pending.values() for part in parts for i in part.indices}
            self.complete()
        self.accumulated = True
        m = self._managed[index]
        if index in self._stale:
            module = m.name.rpartition(".")[0]
            raise RuntimeError(
                f"{m.name} was used before its update: something reads it without calling its module; attach with "
                f'eager=("{module}",), so that it is updated in optimizer.step() (eager=True for a compiled model)'
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
        """The modules whose forwards are to begin with ``before_forward``."""
        return [] if self._whole else self._need.modules

    def before_forward(self, module: nn.Module) -> None:
        """A module's forward begins: what it reads must be up to date."""
        outside = current_task() == -1
        if outside:
            self._stale.clear()
        if self._learning and outside and module.training:
            self._need.called(module)
        if not self._pending:
            return
        if not (module.training and torch.is_grad_enabled()):  # fast paths read weights without calling their modules
            self.complete()
            return
        assert self._shards is not None
        for index in self._need.reads(module):
            bucket = self._shards.where[index][0]
            if bucket in self._pending:
                self._update(bucket)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise RuntimeError("step(closure) needs gradients at once: attach with decoupled=False")
        self._see_compiled()
        shards, frozen = self._shards, None
        parts: dict[int, Part] = {}
        if shards is None:
            return
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter.grad, DeferredGrad) and id(parameter) in self._index:
                    if not shards.gathering:
                        self._gather(shards)
                    index = self._index[id(parameter)]
                    frozen = frozen or Frozen(optimizer)
                    part = parts.setdefault(shards.where[index][0], Part(frozen, {}))
                    part.groups.setdefault(number, []).append(index)
        for bucket, part in parts.items():
            if self._whole:
                self._receive(bucket)
                self._fill(part.indices)
                continue
            for index in part.indices:
                parameter = self._managed[index].parameter
                parameter.grad = None
                if self._options.check and index not in self._early:
                    self._old[index] = parameter.detach().clone()
                    with torch.no_grad():
                        parameter.fill_(torch.nan)
            self._pending.setdefault(bucket, []).append(part)
        if self._whole and parts:
            self._settle()

    def _after_step(self, *_: Any) -> None:
        if self._shards is not None and self._pending:
            for bucket in dict.fromkeys(self._shards.where[index][0] for index in sorted(self._early)):
                if bucket in self._pending:
                    self._update(bucket)

    # --- from backward to backward ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A synchronised backward has begun: what the last one left is dropped, if nobody wants it."""
        for m in self._managed:
            held = m.parameter.grad
            if isinstance(held, DeferredGrad):
                if not held.zeroed:
                    _refuse_second()
                m.parameter.grad = None
        self.complete()
        self._shards, self.accumulated = None, False

    def take(self, shards: Shards, *, exact: bool) -> Callable[[], Tensor] | None:
        """All reduce-scatters have ended: ask for the verdict, put a ``DeferredGrad`` in each ``.grad``.

        Args:
            shards: of the step.
            exact: parameters that no rank used keep None now; otherwise it is seen in their averages.

        Returns:
            What waits for the verdict: whether all is finite, as a 0-dim bool tensor; None without a guard.
        """
        self._shards, self.accumulated = shards, False
        used = [shards.memories[b].used[i] for b, i in shards.where] if exact else None
        finite = None
        if self._options.guard:
            verdict = guard.exchange(self._comm, [p.shard for p in shards.paused.values()], used)
            finite, used = verdict.finite, verdict.used
        elif used is not None:
            everyone = self._comm.gather(bytes(used))
            used = [any(row[i] for row in everyone) for i in range(len(used))]
        for m, grad in zip(self._managed, self._grads):
            grad.renew(finite)
            if m.parameter.requires_grad:
                m.parameter.grad = grad if used is None or used[m.index] else None
        return finite

    def order(self) -> list[int] | None:
        """Parameters in the order in which they will be needed, the last first; None: it was not learnt."""
        if not self._learning:
            return None
        self._learning = False
        return self._need.order()[::-1]

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor | None:
        """Clip what lies in shards, by their norm over all ranks; None: nothing does."""
        shards = self._shards
        held = [m.parameter.grad for m in self._managed]
        deferred = [x for x in held if isinstance(x, DeferredGrad)]
        if shards is None or not deferred:
            return None
        own = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        for bucket, paused in sorted(shards.paused.items()):
            part = clip.delivered(paused, shards.buckets[bucket], self._state.rank, self._state.size, norm_type)
            slots = [i for i, (b, _) in enumerate(shards.where) if b == bucket]
            changes = [x.changes for i in slots if isinstance(x := held[i], DeferredGrad)]
            if any(len(other) != len(changes[0]) for other in changes):
                raise RuntimeError("clip_grad_norm_ comes after scaler.unscale_ of all optimizers")
            for change in changes[0] if changes else ():
                change([part])
            own = clip.add(own, clip.power(part, norm_type), norm_type)
        sums = self._comm.gather_tensor(own.view(1)).view(-1)
        norm = clip.total(sums, norm_type, self._managed[0].parameter.dtype, error_if_nonfinite)
        change = clip.scaling(norm, max_norm)
        for grad in deferred:
            grad.changes.append(change)
        return norm

    def _complete_before(self, *_: Any) -> None:
        self.complete()

    def _gather(self, shards: Shards) -> None:
        shards.gathering = True
        self._comm.executor.resume(sorted(shards.paused, reverse=True), shards.light)

    # --- updates ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[int]:
        """Indices of the parameters that wait for their update."""
        return sorted(i for parts in self._pending.values() for part in parts for i in part.indices)

    def complete(self) -> None:
        """Update whatever is pending. Local, but for the all-gathers that ``step()`` has issued."""
        for bucket in sorted(self._pending, reverse=True):
            self._update(bucket)

    def _update(self, bucket: int) -> None:
        """Receive a bucket and let each optimizer update its part."""
        self._receive(bucket)
        for part in self._pending.pop(bucket):
            for index in part.indices:
                if (old := self._old.pop(index, None)) is not None:
                    with torch.no_grad():
                        self._managed[index].parameter.copy_(old)
            self._fill(part.indices)
            part.frozen.update({n: [self._managed[i].parameter for i in some] for n, some in part.groups.items()})
            for index in part.indices:
                self._managed[index].parameter.grad = None
        if not self._pending:
            self._settle()

    def _settle(self) -> None:
        """All updates are made: keep what the programs' second halves have staged."""
        assert self._shards is not None
        for bucket in self._shards.paused:
            self._receive(bucket)
        self._state.settle()

    def _receive(self, bucket: int) -> None:
        shards = self._shards
        assert shards is not None
        if bucket in shards.received or bucket not in shards.paused:
            return
        started = time.perf_counter()
        failure = self._comm.wait(bucket)
        self.exposed_seconds += time.perf_counter() - started
        if failure:
            self._pending.clear()
            self._fail(failure)
        shards.received.add(bucket)

    @torch.no_grad()
    def _fill(self, indices: Sequence[int]) -> None:
        """Put received gradients into ``.grad``, as the scaler and clipping want them."""
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
                self._managed[index].parameter.grad = None
                continue
            deferred = self._grads[index]
            if deferred.zeroed:
                grad.zero_()
            else:
                key = tuple(map(id, deferred.changes))
                wanted.setdefault(key, (deferred.changes, []))[1].append(grad)
            self._managed[index].parameter.grad = grad
        for changes, gradients in wanted.values():
            for change in changes:
                change(gradients)

    def close(self, *, broken: bool) -> None:
        """Complete what is pending and take the hooks out."""
        try:
            if not broken:
                self.complete()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for m in self._managed:
                if isinstance(m.parameter.grad, DeferredGrad):
                    m.parameter.grad = None


def _refuse_second() -> NoReturn:
    raise RuntimeError(
        "a second backward on top of deferred gradients: wrap all but the last in `with sync.no_sync():`, "
        "or call optimizer.step() or zero_grad() in between"
    )


def _early(model: nn.Module, managed: Sequence[Managed], options: Decoupling) -> set[int]:
    """The parameters of the modules named in ``eager``."""
    if isinstance(options.eager, bool):
        return set()
    modules = dict(model.named_modules())
    wanted: set[int] = set()
    for name in options.eager:
        if name not in modules:
            raise ValueError(f"eager: the model has no module {name!r}; it has {', '.join(filter(None, modules))}")
        inside = {id(p) for p in modules[name].parameters()}
        wanted |= {m.index for m in managed if id(m.parameter) in inside}
    return wanted


def _compiled(model: nn.Module) -> bool:
    """Whether some module has been through ``torch.compile``, whose code does not call our hooks."""
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or type(m).__name__ == "OptimizedModule"
        for m in model.modules()  # as they are now: a layer may have been replaced by its compiled form
    )
