"""The usual schedule: when ``backward()`` has returned, ``.grad`` holds the averages. And how these are clipped.

A norm is taken over the same parts in the same order on every schedule, so it is the same bit for bit. A bucket, padded
with zeros, is cut into as many parts as there are ranks. Powers of elements are added in fp64: within each part, then
over the buckets of one rank's parts, then over ranks.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from thinwire.core.kernels.seeding import upload
from thinwire.core.methods.exchanges import padded
from thinwire.core.program import Method
from thinwire.core.program.bucket import Slot, joined, used_by_nobody
from thinwire.engine.buckets import Buckets, delivered

logger = logging.getLogger("thinwire")


class Coupled:
    """The usual schedule of one attached model, and what all schedules do. ``find_unused``: ask which were used."""

    readers: Sequence[nn.Module] = ()  # modules whose forwards must begin with ``before_forward``

    def __init__(self, buckets: Buckets, *, find_unused: bool) -> None:
        self._session, self._buckets, self._find_unused = buckets.session, buckets, find_unused
        self.accumulated = self._warned = False
        # Averages that no optimizer has used, with their versions, by index: nothing may be added to them.
        self.watched: dict[int, tuple[Tensor, int]] = {}

    def before_forward(self, module: nn.Module) -> None:
        """Bring what a module reads up to date, at the start of its forward."""

    def begin(self) -> None:
        self.accumulated = False

    def check(self, index: int, grad: Tensor | None) -> None:
        if self._added_to(index, grad):
            raise RuntimeError(
                "a second backward on top of averaged gradients: wrap all but the last in `with sync.no_sync():`, "
                "or call optimizer.step() and zero_grad() in between"
            )

    def _added_to(self, index: int, grad: Tensor | None) -> bool:
        """Return whether autograd just added to an average that nothing has changed since."""
        delivered, version = self.watched.get(index, (None, 0))
        return delivered is not None and grad is delivered and delivered._version == version + 1

    def accumulate(self, index: int, grad: Tensor | None) -> None:
        self.accumulated = True
        if grad is not None and self._added_to(index, grad):
            self.watched[index] = grad, grad._version  # exchanged again, it would send the average twice

    def used(self, indices: Iterable[int]) -> None:
        """Stop watching averages that an optimizer is about to use; the script may add to them afterwards."""
        for index in indices:
            self.watched.pop(index, None)

    def untouched(self) -> set[str]:
        """Return names of parameters whose ``.grad`` still holds the last average: not zeroed, nor replaced."""
        return {m.name for m in self._buckets.managed if self._holds(m.index, m.parameter.grad)}

    def _holds(self, index: int, grad: Tensor | None) -> bool:
        delivered, version = self.watched.get(index, (None, 0))
        return grad is not None and grad is delivered and grad._version == version

    def deliver(self) -> None:
        """Commit, and put averages into ``.grad``, except for parameters that are frozen or that no rank used."""
        buckets, step = self._buckets, self._buckets.step
        everyone = self._used_anywhere() if self._find_unused else None
        self._session.commit()
        self.watched.clear()
        watched = self._session.method.has_residual
        if everyone is None:
            unused = self._unused_by_sums()
        else:
            unused = {m.name for m in buckets.managed if not everyone[m.index]}
        for index in range(len(step.entries)):
            memory = buckets.memory(index)
            if memory.handed_over and everyone is None and not watched:
                continue
            for place, (slot, parameter) in enumerate(zip(memory.slots, memory.parameters)):
                result, value = slot.result, slot.value
                slot.value = slot.result = None  # do not keep the gradients' memory alive
                if not parameter.requires_grad:
                    continue
                if not memory.used[place] and slot.name in unused:
                    parameter.grad = None
                elif result is not None:
                    grad = parameter.grad
                    if grad is None or grad.data_ptr() != result.data_ptr() or grad.stride() != result.stride():
                        reused = memory.buffer is not None and not buckets.views
                        parameter.grad = delivered(parameter, result, value, copy=reused)
                if watched and (grad := parameter.grad) is not None:
                    self.watched[buckets.by_name[slot.name].index] = grad, grad._version

    def multiply(self, factor: float) -> None:
        """Multiply what was delivered."""
        for m in self._buckets.managed:
            if (grad := m.parameter.grad) is not None and m.parameter.requires_grad:
                grad.mul_(factor)
                if m.index in self.watched:
                    self.watched[m.index] = grad, grad._version

    def _used_anywhere(self) -> list[bool]:
        comm = self._session.comm
        mine = bytes(m.parameter.grad is not None for m in self._buckets.managed)
        if comm.device.type == "cuda":  # all ranks send the same size: one exchange, which the host reads once
            flags = upload(torch.tensor(list(mine), dtype=torch.uint8), comm.device)
            return [bool(x) for x in comm.gather_tensor(flags).amax(0).tolist()]
        everyone = comm.gather(mine)
        return [any(row[i] for row in everyone) for i in range(len(mine))]

    def _unused_by_sums(self) -> set[str]:
        """Return the parameters that no rank used, as far as their sums show it."""
        asked: dict[str, Slot] = {}
        step = self._buckets.step
        for index in range(len(step.entries)):
            memory, method = self._buckets.memory(index), self._buckets.method_of(index)
            if all(memory.used):
                continue
            for slot, parameter, here in zip(memory.slots, memory.parameters, memory.used):
                if here or not parameter.requires_grad:
                    continue
                if method.sums(slot.shape):
                    asked[slot.name] = slot
                elif not step.told:
                    self._warn_unused(slot.name, method)
        return used_by_nobody(asked) if asked else set()

    def _warn_unused(self, name: str, method: Method) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "thinwire: %s had no gradient on rank %d, which %s counts as zero: if no rank uses it, weight decay "
                "and momentum keep moving it. attach(..., find_unused_parameters=True) leaves .grad at None there, "
                "for one more small exchange per step", name, self._session.rank, method.name,
            )  # fmt: skip

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip what was delivered by its global norm, as ``torch.nn.utils.clip_grad_norm_``. Return the norm, 0-dim."""
        buckets, ranks = self._buckets, self._session.state.size
        last = buckets.plan.buckets(max(0, self._session.state.turn - 1))
        gradients: list[Tensor] = []
        parts: list[Tensor] = []
        for entry in last:
            parameters = [buckets.by_name[name].parameter for name in entry.names]
            here = [p.grad for p in parameters if p.grad is not None]
            gradients += here
            if not here:
                continue
            flat = joined(here) if len(here) == len(parameters) else None
            if flat is None:
                flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
            parts += padded(flat.detach(), ranks).view(ranks, -1)
        if not parts:
            parts = [torch.zeros(1, device=buckets.by_name[last[0].names[0]].parameter.device)] * ranks
        powers = powers_of(parts, norm_type, ranks)
        norm = total_norm(powers, norm_type, norm_dtype(p.dtype for p in gradients), error_if_nonfinite)
        by_kind: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_kind.setdefault(gradient.dtype, []).append(gradient)
        change = scaling(norm, max_norm)
        with torch.no_grad():
            for some in by_kind.values():
                change(some)
        return norm

    @property
    def pending(self) -> list[int]:
        return []

    def complete(self) -> None:
        """Make all pending updates, without other ranks; so does ``close``."""

    def order(self) -> list[int] | None:
        """Return the order of parameters from which to make buckets, if it is not the order of arrival."""
        return None

    def close(self, *, broken: bool) -> None: ...


def powers_of(parts: Sequence[Tensor], norm_type: float, columns: int) -> Tensor:
    """Return norms of columns, each to the power of its type (the maximum for inf), fp64 ``[columns]``.

    ``parts``: 1-D tensors of the columns, row by row; rows are added in order.
    """
    some = [x if x.numel() else x.new_zeros(1) for x in parts]
    norms = torch.stack(torch._foreach_norm(some, norm_type, dtype=torch.float64)).view(-1, columns)
    if math.isinf(norm_type):
        return norms.amax(0)
    rows: list[Tensor] = list((norms**norm_type).unbind())
    return functools.reduce(torch.add, rows)


def total_norm(powers: Tensor, norm_type: float, dtype: torch.dtype, error_if_nonfinite: bool) -> Tensor:
    """Return the norm of all ranks' parts, 0-dim, from their powers ``[W]``."""
    found = powers.amax() if math.isinf(norm_type) else powers.sum()
    norm = found if math.isinf(norm_type) else found ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for the gradients is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm.to(dtype)


def norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a norm over gradients: that of all, or, if there are several, fp32 or wider."""
    kinds = {*dtypes}
    return kinds.pop() if len(kinds) == 1 else torch.float64 if torch.float64 in kinds else torch.float32


def scaling(norm: Tensor, max_norm: float) -> Callable[[list[Tensor]], None]:
    """Return the in-place change by which clipping to a norm scales gradients, by torch's formula."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return lambda gradients: torch._foreach_mul_(gradients, factor)
