"""One bucket of gradients as a program sees it.

There are two pairs of accessors. ``flat`` / ``write``: all gradients concatenated, in autograd's dtype and units (with
the loss scale, if any). ``gradient()`` / ``write_gradient``: fp32 (fp64 for fp64); the loss scale is divided out when
reading and multiplied in when writing. Methods with a residual use the second pair, so that a residual never depends on
the loss scale. :class:`Slot` has the same pairs for one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which residuals, factors and sums are kept: fp32, or fp64 for fp64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


LARGE, LARGE_ON_CARD = 1 << 12, 1 << 22
"""Number of elements from which a tensor gets a call of its own: one pass over memory costs more than the call."""


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one 1-D view; None if they do not lie one after the other, each contiguous."""
    first, size = tensors[0], 0
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for x in tensors:
        here = x.untyped_storage().data_ptr() == memory and x.storage_offset() == start + size
        if not (here and x.is_contiguous() and x.dtype == first.dtype):
            return None
        size += x.numel()
    return first.as_strided((size,), (1,), start)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one batch: a view if they lie one after the other, else a copy."""
    found = joined(tensors)
    return torch.stack(list(tensors)) if found is None else found.view(len(tensors), *tensors[0].shape)


def local_shard(x: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard of a DTensor, detached; else the tensor itself."""
    shard: Tensor = x.detach().to_local() if hasattr(x, "to_local") else x  # type: ignore[attr-defined,unused-ignore]
    return shard


class Slot:
    """One parameter's gradient in a bucket.

    Args:
        name: the parameter's name; residuals are kept under it.
        shape: its shape (logical, whatever the memory format).
        value: the gradient; None if this rank did not use the parameter, which counts as zero.
        dtype, device: of the gradient, needed if ``value`` is None.
        weight: the parameter itself, for a method's weight decay; None if it is not available (LocalWorld).
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

    def value_or_zeros(self) -> Tensor:
        """Return autograd's gradient; -0.0 if unused, so that a sum over ranks shows whether any rank used it."""
        if self.value is None:
            return torch.full(self.shape, -0.0, dtype=self.dtype, device=self.device)
        return self.value

    def gradient(self) -> Tensor:
        """Return the gradient, working dtype, unscaled, contiguous. May share memory with ``.grad``: do not edit."""
        x = self.value_or_zeros().to(working_dtype(self.dtype)).contiguous()
        return x if self.scale is None else x / self.scale

    def matrix(self) -> Tensor:
        """Return the gradient as a matrix ``[shape[0], numel / shape[0]]``."""
        return self.gradient().reshape(self.shape[0], -1)

    def write(self, x: Tensor) -> None:
        """Deliver the averaged gradient (unscaled units, any shape with the right number of elements)."""
        deliver([self], [x if self.scale is None else x * self.scale])


def used_by_nobody(slots: Mapping[Key, Slot]) -> set[Key]:
    """Return the keys of slots that no rank has used, among slots unused by this rank whose result is a sum.

    If no rank used a slot, each sent -0.0, whose sum is -0.0, or nothing was received. One host read for all slots.
    """
    found = {key for key, slot in slots.items() if slot.result is None}
    sums = {key: slot.result for key, slot in slots.items() if slot.result is not None}
    if sums:
        flags = torch.stack([~x.any() & torch.signbit(x).all() for x in sums.values()]).tolist()
        found.update(key for key, nobody in zip(sums, flags) if nobody)
    return found


def deliver(slots: Sequence[Slot], averages: Sequence[Tensor]) -> None:
    """Put averages, in the units and order of the gradients, into the slots' results: one copy call for all."""
    for slot in slots:
        if slot.result is None:
            slot.result = (
                torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) if slot.value is None else slot.value
            )
    results = [slot.result for slot in slots if slot.result is not None]
    torch._foreach_copy_(results, [x.reshape(slot.shape) for slot, x in zip(slots, averages)])
    for slot, x in zip(slots, averages):
        if slot.value is None and slot.dtype != x.dtype and slot.numel and not x.is_meta:
            nobody = x.signbit().all() & ~x.any()  # a value that rounds to -0.0 must not look like unused
            slot.result.view(-1)[:1].add_(torch.where(nobody, -0.0, 0.0).to(slot.dtype))  # type: ignore[union-attr]


class Bucket:
    """The gradients that share one message.

    Args:
        slots: one per parameter; all of one dtype and device.
        scale: the loss scale in the gradients, a 0-dim tensor; None for 1.
        buffer: memory for ``flat``, with at least ``numel`` elements; allocated when needed if None.
        kept: number of elements that a sparse method sends, if the plan says so; 0: it does not.
        views: ``buffer`` split into the slots' shapes, if this has been done before.

    Attributes:
        memo: what programs have derived from the shapes alone, kept from step to step.
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
        self._firsts: list[Tensor] | None = None  # first element of each gradient in ``flat``
        self._flat: Tensor | None = None
        self.memo: dict[object, object] = {}
        if not self.dtype.is_floating_point:
            raise ValueError(f"{self.slots[0].name} is {self.dtype}: gradients must be floating-point numbers")
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

    def blank(self) -> Tensor:
        """Return ``flat`` for a program that overwrites all of it: the gradients are not copied there."""
        return self._gather(None, copied=False)

    def shares(self, ranks: int) -> Tensor:
        """Like ``flat``, but divided by ``ranks`` in the same pass over memory: their sum is the average."""
        if self._flat is not None:
            raise RuntimeError(f"bucket {self.index}: shares() comes first, or not at all")
        return self.mark_used(self._gather(1.0 / ranks))

    def _gather(self, factor: float | None, copied: bool = True) -> Tensor:
        if self._flat is not None:
            return self._flat
        buffer = self._buffer
        if buffer is None:
            buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        flat = buffer[: self.numel]
        if self.device.type == "meta":  # shapes only: arithmetic on meta tensors would import torch's compiler, 2 s
            self._flat = flat
            return flat
        targets, sources = [], []
        large = LARGE if self.device.type == "cpu" else LARGE_ON_CARD
        for slot, view in zip(self.slots, self.split(flat) if self._views is None else self._views):
            slot.result = view
            if not copied:
                continue
            if slot.value is None:
                view.fill_(-0.0)
            elif factor is not None and slot.numel >= large:
                torch.mul(slot.value, factor, out=view)
            else:
                targets.append(view)
                sources.append(slot.value)
        if targets and factor is not None:  # many small tensors: one call for all
            torch._foreach_copy_(targets, sources)
            torch._foreach_mul_(targets, factor)
        elif targets:
            torch._foreach_copy_(targets, sources)
        self._flat = flat  # set last: it tells another thread that gradients are no longer read
        return flat

    def mark_used(self, message: Tensor) -> Tensor:
        """Make sure that the first element of each used gradient in a message, laid out as ``flat``, is not -0.0.

        Call it last, because scaling and casts turn small numbers into -0.0.
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
        """Return ``flat``, padded with zeros to a multiple of that many elements; None if the buffer has no room."""
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
        if x.device.type == "meta" or x.data_ptr() != flat.data_ptr() or x.dtype != flat.dtype:
            flat.copy_(x.reshape(-1))

    def gradient(self) -> Tensor:
        """All gradients concatenated, working dtype, unscaled: a new tensor that the program may edit."""
        x = torch.cat([slot.value_or_zeros().reshape(-1) for slot in self.slots]).to(working_dtype(self.dtype))
        return x if self.scale is None else x.div_(self.scale)

    def write_gradient(self, x: Tensor) -> None:
        """Deliver all averaged gradients, unscaled units: the counterpart of ``gradient()``."""
        deliver(self.slots, self.split(x if self.scale is None else x * self.scale))

    def split(self, x: Tensor) -> list[Tensor]:
        """Split a 1-D tensor of ``numel`` elements into the slots' shapes (views)."""
        pieces = x.split([slot.numel for slot in self.slots])
        return [piece.view(slot.shape) for slot, piece in zip(self.slots, pieces)]
