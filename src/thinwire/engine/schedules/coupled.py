"""The usual schedule: when ``backward()`` has returned, ``.grad`` holds the averages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import upload
from thinwire.core.program import Method
from thinwire.core.program.bucket import Slot, used_by_nobody
from thinwire.engine.buckets import Buckets
from thinwire.engine.memory import delivered
from thinwire.engine.schedules import clip
from thinwire.engine.schedules.schedule import Schedule

logger = logging.getLogger("thinwire")


class DeliveredGrads:
    """Averages that have become ``.grad``, watched until ``step()`` has used them: nothing may be added to them."""

    def __init__(self) -> None:
        self.noted: dict[int, tuple[Tensor, int]] = {}

    def renew(self) -> None:
        """Forget the last step's averages, before another step's are delivered."""
        self.noted.clear()

    def note(self, index: int, grad: Tensor) -> None:
        """Note a parameter's average, as it is now."""
        self.noted[index] = grad, grad._version

    def forget(self, indices: Iterable[int]) -> None:
        """Stop watching averages that an optimizer is about to use; the script may add to them afterwards."""
        for index in indices:
            self.noted.pop(index, None)

    def holds(self, index: int, grad: Tensor | None) -> bool:
        """Return whether a ``.grad`` is still the average that was delivered: not zeroed, nor replaced."""
        delivered, version = self.noted.get(index, (None, 0))
        return grad is not None and grad is delivered and grad._version == version

    def added_to(self, index: int, grad: Tensor | None) -> bool:
        """Return whether autograd just added to an average that nothing has changed since."""
        delivered, version = self.noted.get(index, (None, 0))
        return delivered is not None and grad is delivered and delivered._version == version + 1


class Coupled(Schedule):
    """The usual schedule of one attached model.

    Args:
        buckets: of its plan.
        find_unused: whether to ask all ranks which parameters were used, whatever the method.
    """

    def __init__(self, buckets: Buckets, *, find_unused: bool) -> None:
        self._session, self._buckets, self._find_unused = buckets.session, buckets, find_unused
        self._delivered = DeliveredGrads()
        self.watched = self._delivered.noted
        self._warned = False

    def begin(self) -> None:
        """Start the step with nothing accumulated."""
        self.accumulated = False

    def check(self, index: int, grad: Tensor | None) -> None:
        if self._delivered.added_to(index, grad):
            raise RuntimeError(
                "a second backward on top of averaged gradients: wrap all but the last in `with sync.no_sync():`, "
                "or call optimizer.step() and zero_grad() in between"
            )

    def accumulate(self, index: int, grad: Tensor | None) -> None:
        self.accumulated = True
        if grad is not None and self._delivered.added_to(index, grad):
            self._delivered.note(index, grad)  # with its new version: exchanged again, it would send the average twice

    def used(self, indices: Sequence[int]) -> None:
        self._delivered.forget(indices)

    def untouched(self) -> set[str]:
        managed = self._buckets.parameters.managed
        return {m.name for m in managed if self._delivered.holds(m.index, m.parameter.grad)}

    def deliver(self) -> None:
        """Commit, and put the averages into ``.grad``, except for parameters that are frozen or that no rank used."""
        buckets, parameters = self._buckets, self._buckets.parameters
        step = buckets.step
        assert step is not None
        everyone = self._used_anywhere() if self._find_unused else None
        self._session.commit()
        self._delivered.renew()
        watched = self._session.method.has_residual
        if everyone is None:
            unused = self._unused_by_sums()
        else:
            unused = {m.name for m in parameters.managed if not everyone[m.index]}
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
                    self._delivered.note(parameters.by_name[slot.name].index, grad)

    def _used_anywhere(self) -> list[bool]:
        comm = self._session.comm
        assert comm is not None
        mine = bytes(m.parameter.grad is not None for m in self._buckets.parameters.managed)
        if comm.device.type == "cuda":  # all ranks send the same size: one exchange, which the host reads once
            flags = upload(torch.tensor(list(mine), dtype=torch.uint8), comm.device)
            return [bool(x) for x in comm.gather_tensor(flags).amax(0).tolist()]
        everyone = comm.gather(mine)
        return [any(row[i] for row in everyone) for i in range(len(mine))]

    def _unused_by_sums(self) -> set[str]:
        """Return the parameters that no rank used, as far as their sums show it."""
        asked: dict[str, Slot] = {}
        step = self._buckets.step
        assert step is not None
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
        return used_by_nobody(asked)

    def _warn_unused(self, name: str, method: Method) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "thinwire: %s had no gradient on rank %d, which %s counts as zero: if no rank uses it, weight decay "
                "and momentum keep moving it. attach(..., find_unused_parameters=True) leaves .grad at None there, "
                "for one more small exchange per step", name, self._session.rank, method.name,
            )  # fmt: skip

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        return clip.whole(self._buckets, max_norm, norm_type, error_if_nonfinite)
