"""A model's trainable parameters as one flat vector, and a check that two models have the same ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.records import UNREADABLE
from thinwire.systems.parameter_server.buffers import BufferLayout


class LayoutMismatch(ValueError):
    """A node's model differs from the server's."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes in the order of ``named_parameters`` (shared ones once), their one dtype, and the buffers."""

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

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({**vars(self), "dtype": str(self.dtype), "buffers": vars(self.buffers)})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the text does not hold a layout.
        """
        try:
            data = json.loads(text)
            dtype = torch.float64 if data["dtype"] == "torch.float64" else torch.float32
            names, shapes = _read(data)
            buffers = data.get("buffers", {"names": [], "shapes": [], "floats": 0})
            return cls(names, shapes, dtype, BufferLayout(*_read(buffers), int(buffers["floats"])))
        except UNREADABLE as error:
            raise ValueError(f"{str(text)[:40]!r} is not the layout of a model ({error})") from error

    # --- tensors --------------------------------------------------------------------------------------------------

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
        """View received bytes as a flat vector ``[D]``.

        Raises:
            ValueError: the length does not fit.
        """
        if message.numel() != self.numel * self.dtype.itemsize:
            raise ValueError(f"{message.numel()} bytes arrived, but this model has {self.numel} elements")
        return message.view(self.dtype)

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat vector into the model."""
        parameters = self._parameters(model)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.copy_(piece.view(p.shape))


def _read(data: dict[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return tuple(data["names"]), tuple(tuple(shape) for shape in data["shapes"])
