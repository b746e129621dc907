"""Buffers that training changes, such as a batch norm's running means: averaged with the weights, not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from thinwire.core.collectives.sockets import shares_memory

_KEPT = 0.9


@dataclass(frozen=True)
class BufferLayout:
    """A model's saved float and integer buffers as one flat vector in fp64, floats first.

    Attributes:
        names, shapes: of the buffers, in the order of the vector.
        floats: how many of the elements are floats; the others are counts.
    """

    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    floats: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> BufferLayout:
        """Return a model's layout, maybe empty.

        Left out are constants (bool masks, buffers not in ``state_dict``), and complex, sparse and empty buffers.
        """
        saved = model.state_dict()
        found = [(n, b) for n, b in model.named_buffers() if n in saved and b.numel() and b.dtype != torch.bool]
        found = [(n, b) for n, b in found if not b.is_complex() and b.layout is torch.strided]
        found.sort(key=lambda pair: not pair[1].is_floating_point())
        floats = sum(b.numel() for _, b in found if b.is_floating_point())
        return cls(tuple(n for n, _ in found), tuple(tuple(b.shape) for _, b in found), floats)

    @property
    def numel(self) -> int:
        """B, the number of elements of the flat vector."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def flat(self, model: nn.Module) -> Tensor:
        """Return a copy of the model's buffers, ``[B]`` fp64."""
        buffers = dict(model.named_buffers())
        return torch.cat([buffers[name].detach().reshape(-1).double() for name in self.names])

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a vector, or rows of them, as views of one buffer each."""
        return list(flat.split([torch.Size(shape).numel() for shape in self.shapes], dim=-1))

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat vector into the model.

        A buffer stays as it is if its new value is not finite, as a mask's, or is the old one in fp64, which does not
        hold every large integer.
        """
        buffers = dict(model.named_buffers())
        for name, shape, piece in zip(self.names, self.shapes, self.split(flat)):
            held = buffers[name]
            new = piece.view(shape).to(held.device)
            if new.isfinite().all() and not torch.equal(held.double(), new):
                if shares_memory(held):
                    held.data = new.to(held.dtype)
                else:
                    held.copy_(new)

    def read(self, message: Tensor) -> Tensor:
        """View received bytes, ``uint8 [8 B]``, as a flat vector ``[B]``.

        Raises:
            ValueError: the length does not fit.
        """
        if message.numel() != 8 * self.numel:
            raise ValueError(f"{message.numel()} bytes of buffers arrived, expected {8 * self.numel}")
        return message.view(torch.float64)

    def mean(self, rows: Sequence[Tensor]) -> Tensor:
        """Combine the buffers of several workers: average the floats, where finite, and take the largest count."""
        kept = []
        for rows_of_one in self.split(torch.stack(list(rows))):
            finite = rows_of_one.isfinite().all(1)
            kept.append(rows_of_one[finite] if finite.any() else rows_of_one[:1])
        means = [one.amax(0) if counts else one.mean(0) for one, counts in zip(kept, self.counts())]
        return torch.cat(means)

    def counts(self) -> list[bool]:
        """Return for each buffer whether it holds counts."""
        ends = accumulate(torch.Size(shape).numel() for shape in self.shapes)
        return [end > self.floats for end in ends]


class RunningBuffers:
    """The server's buffers: a moving average (0.9 of the old value) of what nodes send; it starts with the first value.

    Args:
        layout: of the model's buffers.
        value: the average to start from, ``[B]``.
    """

    def __init__(self, layout: BufferLayout, value: Tensor | None = None) -> None:
        self.layout, self.value = layout, value

    def add(self, x: Tensor) -> None:
        """Add one node's buffers, ``[B]``. Those that are not finite are ignored."""
        if self.value is None:
            self.value = x.clone()
            return
        value = self.value.clone()  # the old tensor may still be being sent, so it must not change
        for old, new, counts in zip(self.layout.split(value), self.layout.split(x), self.layout.counts()):
            if not new.isfinite().all():
                continue
            if not old.isfinite().all():
                old.copy_(new)
            elif counts:
                torch.maximum(old, new, out=old)
            else:
                old.mul_(_KEPT).add_(new, alpha=1 - _KEPT)
        self.value = value

    def write(self, model: nn.Module) -> None:
        """Copy the average into a model; leave the model alone if no buffers have come yet."""
        if self.value is not None:
            self.layout.write(self.value, model)
