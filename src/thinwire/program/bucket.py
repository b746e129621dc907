"""One bucket of gradients as a program sees it.

Two pairs of words. ``flat`` / ``write``: all gradients concatenated, in the dtype and the units that autograd left (a
loss scale, if any, is still in them). ``gradient()`` / ``write_gradient``: fp32 (fp64 for fp64), the loss scale divided
out on the way in and multiplied on the way out; methods with a residual use these, so that a residual never depends on
the loss scale. The same pair exists per tensor on :class:`Slot`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which residuals, factors and sums are kept: fp32, or fp64 for fp64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


LARGE = 1 << 12
"""Elements from which a tensor deserves a call of its own."""


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.device.type != "meta" and a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


class Slot:
    """One parameter's gradient in a bucket.

    Args:
        name: the parameter's name; residuals are kept under it.
        shape: its shape (logical, whatever the memory format).
        value: the gradient; None where this rank did not use the parameter, which counts as zero.
        dtype, device: of the gradient, needed where ``value`` is None.
        weight: the parameter itself, for a method's weight decay; None where it is not at hand (LocalWorld).
    """

    __slots__ = ("device", "dtype", "name", "numel", "result", "scale", "shape", "value", "weight")

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        value: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.numel = self.shape.numel()
        self.value = value
        self.dtype = dtype
        self.device = device
        self.weight = weight
        self.scale: Tensor | None = None
        self.result: Tensor | None = None

    def raw(self) -> Tensor:
        """The gradient as autograd left it; where unused -0.0, so that a sum over ranks shows whether any used it."""
        if self.value is None:
            return torch.full(self.shape, -0.0, dtype=self.dtype, device=self.device)
        return self.value

    def gradient(self) -> Tensor:
        """The gradient in the working dtype, unscaled, contiguous. May share memory with ``.grad``: do not edit it."""
        x = self.raw().to(working_dtype(self.dtype)).contiguous()
        return x if self.scale is None else x / self.scale

    def matrix(self) -> Tensor:
        """The gradient as a matrix ``[shape[0], numel / shape[0]]``."""
        return self.gradient().reshape(self.shape[0], -1)

    def write(self, x: Tensor) -> None:
        """Deliver the averaged gradient (unscaled units, any shape with the right number of elements)."""
        deliver([self], [x if self.scale is None else x * self.scale])


def used_by_nobody(slots: Mapping[Key, Slot]) -> set[Key]:
    """Of slots that this rank has not used and whose result is a sum, the keys of those that no rank has used.

    Each rank brought -0.0 then, which changes no sum; or nothing was received. One host read for all.
    """
    found = {key for key, slot in slots.items() if slot.result is None}
    sums = {key: slot.result for key, slot in slots.items() if slot.result is not None}
    if sums:
        flags = torch.stack([~x.any() & torch.signbit(x).all() for x in sums.values()]).tolist()
        found.update(key for key, nobody in zip(sums, flags) if nobody)
    return found


def deliver(slots: Sequence[Slot], averages: Sequence[Tensor]) -> None:
    """Put averages, in the units and order of the gradients, into the slots' results: one copy for all."""
    for slot in slots:
        if slot.result is None:
            slot.result = (
                torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) if slot.value is None else slot.value
            )
    results = [slot.result for slot in slots if slot.result is not None]
    torch._foreach_copy_(results, [x.reshape(slot.shape) for slot, x in zip(slots, averages)])
    for slot, x in zip(slots, averages):
        if slot.value is None and slot.dtype != x.dtype and slot.numel and not x.is_meta:
            nobody = x.signbit().all() & ~x.any()  # what rounds to -0.0 is not the -0.0 of nobody's
            slot.result.view(-1)[:1].add_(torch.where(nobody, -0.0, 0.0).to(slot.dtype))  # type: ignore[union-attr]


class Bucket:
    """The gradients that share one message.

    Args:
        index: place in the plan.
        slots: one per parameter; all of one dtype and device.
        scale: 0-dim tensor, the loss scale that is in the gradients; None for 1.
        buffer: memory for ``flat``, with at least ``numel`` elements; allocated when needed if None.
        kept: elements that a sparse method sends, where the plan says so; 0: it does not.
        views: ``buffer`` cut into the slots' shapes, where somebody has done so before.

    Attributes:
        memo: what programs have made of the shapes alone, kept from step to step.
    """

    def __init__(
        self,
        index: int,
        slots: Sequence[Slot],
        *,
        scale: Tensor | None = None,
        buffer: Tensor | None = None,
        kept: int = 0,
        views: Sequence[Tensor] | None = None,
    ) -> None:
        self.index = index
        self.kept = kept
        self.slots = list(slots)
        self.numel = sum(slot.numel for slot in self.slots)
        self.scale = scale
        self.dtype = self.slots[0].dtype
        self.device = self.slots[0].device
        self._buffer = buffer
        self._views = views
        self._firsts: list[Tensor] | None = None  # elements of ``flat``
        self._flat: Tensor | None = None
        self.memo: dict[object, object] = {}
        if not self.dtype.is_floating_point:
            raise ValueError(f"{self.slots[0].name} is {self.dtype}: gradients are floating-point numbers")
        for slot in self.slots:
            if slot.dtype != self.dtype:
                raise ValueError(
                    f"bucket {index} mixes dtypes: {self.slots[0].name} is {self.dtype}, {slot.name} is {slot.dtype}"
                )
            slot.scale = scale

    def renew(self, scale: Tensor | None) -> None:
        """Begin another step with what the slots now hold."""
        self._flat = None
        if scale is not None or self.scale is not None:
            self.scale = scale
            for slot in self.slots:
                slot.scale = scale

    @property
    def filled(self) -> bool:
        """Whether the gradients have been copied into ``flat``."""
        return self._flat is not None

    @property
    def flat(self) -> Tensor:
        """All gradients concatenated, raw units, 1-D. The program may overwrite it."""
        return self._gather(None)

    def shares(self, ranks: int) -> Tensor:
        """As ``flat``, divided by ``ranks`` on the way, in the same pass over memory: their sum is the average."""
        if self._flat is not None:
            raise RuntimeError(f"bucket {self.index}: shares() comes first, or not at all")
        return self.mark_used(self._gather(1.0 / ranks))

    def _gather(self, factor: float | None) -> Tensor:
        if self._flat is not None:
            return self._flat
        buffer = self._buffer
        if buffer is None:
            buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        flat = buffer[: self.numel]
        if self.device.type == "meta":  # shapes alone: arithmetic on meta tensors would import torch's compiler, 2 s
            self._flat = flat
            return flat
        targets, sources = [], []
        for slot, view in zip(self.slots, self.split(flat) if self._views is None else self._views):
            slot.result = view
            if slot.value is None:
                view.fill_(-0.0)
            elif factor is not None and slot.numel >= LARGE:
                torch.mul(slot.value, factor, out=view)
            else:
                targets.append(view)
                sources.append(slot.value)
        if targets:  # many small ones: one call, not one each
            torch._foreach_copy_(targets, sources)
            if factor is not None:
                torch._foreach_mul_(targets, factor)
        self._flat = flat  # last: another thread may take it from here that gradients are no longer read
        return flat

    def mark_used(self, message: Tensor) -> Tensor:
        """Let the first element of every gradient in a message, laid out as ``flat``, be another than -0.0.

        To be called last, as scaling and casts turn small numbers into -0.0.
        """
        if message.device.type == "meta":
            return message
        firsts = self._firsts if message is self._flat else None
        if firsts is None:
            begins = itertools.accumulate((slot.numel for slot in self.slots), initial=0)
            firsts = [message[b : b + min(1, s.numel)] for s, b in zip(self.slots, begins)]
            if message is self._flat and self._views is not None:  # the same memory in every step
                self._firsts = firsts
        used = [first for slot, first in zip(self.slots, firsts) if slot.value is not None and slot.numel]
        if used:
            torch._foreach_add_(used, 0.0)
        return message

    def padded(self, multiple: int) -> Tensor | None:
        """``flat`` with zeros behind it up to a multiple of that many elements; None where the buffer has no room."""
        flat, size = self.flat, -(-self.numel // multiple) * multiple
        if size == self.numel:
            return flat
        if self._buffer is None or self._buffer.numel() < size:
            return None
        if self.device.type != "meta":
            self._buffer[self.numel : size].zero_()
        return self._buffer[:size]

    def write(self, x: Tensor) -> None:
        """Deliver all averaged gradients, raw units: the counterpart of ``flat``."""
        flat = self.flat
        if not _same_memory(x, flat):
            flat.copy_(x.reshape(-1))

    def gradient(self) -> Tensor:
        """All gradients concatenated, working dtype, unscaled: a new tensor that the program may edit."""
        x = torch.cat([slot.raw().reshape(-1) for slot in self.slots]).to(working_dtype(self.dtype))
        return x if self.scale is None else x.div_(self.scale)

    def write_gradient(self, x: Tensor) -> None:
        """Deliver all averaged gradients, unscaled units: the counterpart of ``gradient()``."""
        deliver(self.slots, self.split(x if self.scale is None else x * self.scale))

    def split(self, x: Tensor) -> list[Tensor]:
        """Cut a 1-D tensor of ``numel`` elements into the slots' shapes (views)."""
        pieces = x.split([slot.numel for slot in self.slots])
        return [piece.view(slot.shape) for slot, piece in zip(self.slots, pieces)]
