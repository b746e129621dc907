"""A model's trainable parameters as one flat vector, its buffers as another, and checks that two models are the same.

Buffers that training changes, such as a batch norm's running means, are averaged with the weights, not trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from thinwire.core.collectives.socket_stream import shares_memory
from thinwire.core.records import Record

_KEPT = 0.9


def slices(numel: int, shards: int) -> tuple[slice, ...]:
    """Cut ``[D]`` into contiguous slices, one per shard, of equal size up to one element; none is empty."""
    if not 1 <= shards <= numel:
        raise ValueError(f"shards={shards!r} must be at least 1 and at most the model's {numel} elements")
    ends = [numel * i // shards for i in range(shards + 1)]
    return tuple(slice(first, end) for first, end in pairwise(ends))


@dataclass(frozen=True)
class BufferLayout:
    """A model's saved buffers as one flat vector in fp64: the ``floats`` elements of float ones, then counts."""

    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    floats: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> BufferLayout:
        """Leave out constants (bool masks, buffers not in ``state_dict``), and complex, sparse and empty buffers."""
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
        buffers = dict(model.named_buffers())
        return torch.cat([buffers[name].detach().reshape(-1).double() for name in self.names])

    def split(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split([torch.Size(shape).numel() for shape in self.shapes], dim=-1))

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy into the model, but keep a buffer whose new value is not finite, or the old one as fp64 holds it."""
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
        """View received bytes, ``uint8 [8 B]``, as a flat vector ``[B]``. ``ValueError``: the length does not fit."""
        if message.nbytes != 8 * self.numel:
            raise ValueError(f"{message.nbytes} bytes of buffers arrived, expected {8 * self.numel}")
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
        ends = accumulate(torch.Size(shape).numel() for shape in self.shapes)
        return [end > self.floats for end in ends]


class RunningBuffers:
    """The server's buffers ``[B]``: a moving average (0.9 of the old value) of what nodes send, from the first on."""

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
        if self.value is not None:
            self.layout.write(self.value, model)


class LayoutMismatch(ValueError):
    """A node's model differs from the server's."""


@dataclass(frozen=True)
class Layout(Record):
    """Names and shapes in the order of ``named_parameters`` (shared ones once), their one dtype, and the buffers."""

    called = "the layout of a model"

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    buffers: BufferLayout = field(default_factory=BufferLayout)

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of a model.

        Raises:
            ValueError: the model has no trainable parameter, several dtypes, or another than fp32 and fp64.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no trainable parameters; set requires_grad=True on what should be trained")
        dtypes = {p.dtype for _, p in named}
        if dtypes - {torch.float32, torch.float64} or len(dtypes) > 1:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"all trainable parameters must be fp32, or all fp64, not {found}: use model.float()")
        names, shapes = tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named)
        return cls(names, shapes, dtypes.pop(), BufferLayout.of(model))

    @property
    def numel(self) -> int:
        """D, the number of elements of the flat vector."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def number(self) -> int:
        """63 bits of a hash of the layout."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "little") >> 1

    def check(self, server: Layout) -> None:
        """Raise :class:`LayoutMismatch` if the layouts differ, naming the first parameter that does."""
        mine, theirs = (list(zip(x.names, x.shapes)) for x in (self, server))
        for ours, other in zip(mine, theirs):
            if ours != other:
                raise LayoutMismatch(
                    f"this node's model has {ours[0]} {list(ours[1])}, the server's has {other[0]} "
                    f"{list(other[1])}: start all with the same model"
                )
        if len(mine) != len(theirs):
            raise LayoutMismatch(f"this node's model has {len(mine)} parameters, the server's {len(theirs)}")
        if self.dtype != server.dtype:
            raise LayoutMismatch(f"this node's model is {self.dtype}, the server's {server.dtype}")
        if self.buffers != server.buffers:
            raise LayoutMismatch("this node's model buffers differ from the server's: start all with the same model")

    def _parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    def flat(self, model: nn.Module) -> Tensor:
        """Return a copy of the parameters, ``[D]``."""
        return torch.cat([p.detach().reshape(-1) for p in self._parameters(model)])

    def gradient(self, model: nn.Module) -> Tensor:
        """Return the gradients, ``[D]``; 0 where a parameter has none."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters(model)]
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def read(self, message: Tensor) -> Tensor:
        """View received bytes as a flat vector ``[D]``. ``ValueError``: the length does not fit."""
        if message.nbytes != self.numel * self.dtype.itemsize:
            raise ValueError(f"{message.nbytes} bytes arrived, but this model has {self.numel} elements")
        return message.view(self.dtype)

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat vector into the model."""
        parameters = self._parameters(model)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.copy_(piece.view(p.shape))
