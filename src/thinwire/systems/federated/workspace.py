"""A model whose trainable parameters are in one vector and their gradients in another.

So loading weights is one copy and a local step one addition: with small models these are most of the overhead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.core.collectives.socket_stream import shares_memory

Evaluate = Callable[[nn.Module, int], Mapping[str, float]]
"""(model in eval mode, round) -> numbers by name; round -1 is before the first."""


class Workspace:
    """One device's copy of a model. ``reset`` restores everything in it. Shared and frozen parameters are allowed.

    ``x`` ``[D]``: the trainable parameters, in order of ``named_parameters``; ``buffer_sizes``: of those averaged.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.model = copy.deepcopy(model)
        if device is not None:
            self.model.to(device)
        found = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not found:
            raise ValueError("the model has no trainable parameters: set requires_grad on those to train")
        kinds = sorted({f"{p.dtype} on {p.device}" for _, p in found})
        if len(kinds) > 1 or not found[0][1].dtype.is_floating_point:
            raise ValueError(
                f"the trainable parameters are {', '.join(kinds)}: convert them to one floating dtype and device"
            )
        self.names = tuple(name for name, _ in found)
        self.shapes = tuple(p.shape for _, p in found)
        self._parameters = [p for _, p in found]
        with torch.no_grad():
            self.x = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._g = torch.zeros_like(self.x)
        self._views = self.split(self._g)
        for p, piece in zip(self._parameters, self.split(self.x)):
            p.data = piece
        self.device, self.dtype = self.x.device, self.x.dtype
        trained = {id(p) for p in self._parameters}
        self._fixed = [p for p in self.model.parameters() if id(p) not in trained]
        self._initial_fixed = [p.detach().clone() for p in self._fixed]
        self._initial_other = [b.clone() for b in self.model.buffers() if not _is_averaged(b)]
        self.buffer_sizes = [b.numel() for b in filter(_is_averaged, self.model.buffers())]

    def split(self, x: Tensor) -> list[Tensor]:
        pieces = x.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes)]

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self.split(x)))

    @property
    def buffers(self) -> Tensor:
        """All floating-point buffers (BatchNorm's statistics), ``[B]``, a copy in the dtype of ``x``."""
        found = [b.detach().reshape(-1) for b in filter(_is_averaged, self.model.buffers())]
        return torch.cat([b.to(self.dtype) for b in found]) if found else self.x.new_empty(0)

    @property
    def buffers_to_sum(self) -> Tensor:
        """``[B + n]``: the same with zeros for a buffer that is not finite, then for each of the n whether it is."""
        found = self.buffers.split(self.buffer_sizes)
        finite = [x.isfinite().all().to(self.dtype) for x in found]
        return torch.cat([*(x if ok else torch.zeros_like(x) for x, ok in zip(found, finite)), torch.stack(finite)])

    @torch.no_grad()
    def reset(self, theta: Tensor, buffers: Tensor) -> None:
        """Load weights ``[D]`` and floating-point buffers ``[B]``; reset everything else to its initial value."""
        self.x.copy_(theta)
        _write_buffers(self.model, buffers)
        others = [b for b in self.model.buffers() if not _is_averaged(b)]
        for b, initial in zip(others, self._initial_other):
            _put(b, initial)
        for p, initial in zip(self._fixed, self._initial_fixed):
            p.copy_(initial)
        for p, view in zip(self._parameters, self._views):
            p.grad = view
        self.model.train()

    def gradient(self, loss: Tensor) -> Tensor:
        """Run backward; return the gradient ``[D]``, in memory that the next call overwrites."""
        self._g.zero_()
        for p, view in zip(self._parameters, self._views):
            if p.grad is not view:  # the loss function or a hook has replaced it
                p.grad = view
        loss.backward()
        return self._g

    @torch.no_grad()
    def write_to(self, model: nn.Module, theta: Tensor, buffers: Tensor) -> None:
        own = dict(model.named_parameters())
        for name, piece in self.named(theta).items():
            own[name].copy_(piece)
        _write_buffers(model, buffers)

    def evaluated(self, theta: Tensor, buffers: Tensor, evaluate: Evaluate, round: int) -> dict[str, float]:
        self.reset(theta, buffers)
        self.model.eval()
        with torch.no_grad():
            found = evaluate(self.model, round)
        if not isinstance(found, Mapping):
            raise ValueError(f'evaluate() must return numbers by name, such as {{"accuracy": 0.9}}, not {found!r}')
        return {name: float(value) for name, value in found.items()}


def buffers_of_sum(mean: Tensor, sizes: Sequence[int], old: Tensor) -> Tensor:
    """Return the new buffers ``[B]`` from the mean of ``buffers_to_sum``; the old one where no client's was finite."""
    *means, shares = mean.split([*sizes, len(sizes)])
    rows = zip(means, shares, old.split(list(sizes)))
    return torch.cat([x / share if share > 0 else kept for x, share, kept in rows])


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and buffer.layout is torch.strided


def _write_buffers(model: nn.Module, buffers: Tensor) -> None:
    at = 0
    for b in filter(_is_averaged, model.buffers()):
        _put(b, buffers[at : at + b.numel()].view(b.shape))
        at += b.numel()


def _put(buffer: Tensor, value: Tensor) -> None:
    if shares_memory(buffer):
        buffer.data = value.to(buffer, copy=True)
    else:
        buffer.copy_(value)
