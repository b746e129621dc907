"""Buffers that training changes, such as a batch norm's running means: averaged with the weights, not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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

        Left out are constants (bool masks, buffers not in ``state_dict``), and complex and empty buffers.
        """
        saved = model.state_dict()
        found = [(n, b) for n, b in model.named_buffers() if n in saved and b.numel() and b.dtype != torch.bool]
        found = [(n, b) for n, b in found if not b.is_complex()]
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

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat vector into the model."""
        buffers = dict(model.named_buffers())
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        for name, shape, piece in zip(self.names, self.shapes, flat.split(sizes)):
            buffers[name].copy_(piece.view(shape))

    def read(self, message: Tensor) -> Tensor:
        """View received bytes, ``uint8 [8 B]``, as a flat vector ``[B]``.

        Raises:
            ValueError: the length does not fit.
        """
        if message.numel() != 8 * self.numel:
            raise ValueError(f"{message.numel()} bytes of buffers arrived, expected {8 * self.numel}")
        return message.view(torch.float64)

    def mean(self, rows: Sequence[Tensor]) -> Tensor:
        """Combine the buffers of several workers: average the floats, take the largest count."""
        stacked = torch.stack(list(rows))
        return torch.cat([stacked[:, : self.floats].mean(0), stacked[:, self.floats :].amax(0)])


class RunningBuffers:
    """The server's buffers: a moving average (0.9 of the old value) of what nodes send; it starts with the first value.

    Args:
        layout: of the model's buffers.
        value: the average to start from, ``[B]``.
    """

    def __init__(self, layout: BufferLayout, value: Tensor | None = None) -> None:
        self.layout, self.value = layout, value

    def add(self, x: Tensor) -> None:
        """Add one node's buffers, ``[B]``. They are ignored if any value is not finite."""
        if not x.isfinite().all():
            return
        if self.value is None:
            self.value = x.clone()
            return
        cut = self.layout.floats
        new = self.value.clone()  # the old tensor may still be being sent, so it must not change
        new[:cut].mul_(_KEPT).add_(x[:cut], alpha=1 - _KEPT)
        torch.maximum(new[cut:], x[cut:], out=new[cut:])
        self.value = new

    def write(self, model: nn.Module) -> None:
        """Copy the average into a model; leave the model alone if no buffers have come yet."""
        if self.value is not None:
            self.layout.write(self.value, model)
