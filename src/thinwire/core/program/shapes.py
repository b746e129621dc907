"""Shapes of some operations on meta tensors; torch computes them in Python, importing its compiler (a second)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ShapesAlone(TorchFunctionMode):
    """Inside, these operations on meta tensors return uninitialised tensors of the right shape; others are torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None and (found := rule(*args, **(kwargs or {}))) is not None:
            return found
        return func(*args, **(kwargs or {}))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if not first.is_meta or any(x.dtype is not first.dtype or x.ndim != first.ndim for x in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor]) -> Tensor | None:
    first = tensors[0]
    return first.new_empty(len(tensors), *first.shape) if first.is_meta else None


def _where(condition: Tensor, this: Any, that: Any) -> Tensor | None:
    if not condition.is_meta:
        return None
    shapes = {x.shape for x in (condition, this, that) if isinstance(x, Tensor) and x.ndim} or {condition.shape}
    return condition.new_empty(shapes.pop(), dtype=torch.result_type(this, that)) if len(shapes) == 1 else None


def _index(x: Tensor, index: Any) -> Tensor | None:
    if not (x.is_meta and isinstance(index, Tensor) and index.dtype is torch.int64):
        return None
    return x.new_empty(*index.shape, *x.shape[1:])


def _arange(count: Any, *more: Any, device: Any = None, dtype: Any = torch.int64) -> Tensor | None:
    on_meta = not more and isinstance(count, int) and device is not None and torch.device(device).type == "meta"
    return torch.empty(count, dtype=dtype, device=device) if on_meta else None


def _zeros(*shape: Any, device: Any = None, dtype: Any = None) -> Tensor | None:
    on_meta = device is not None and torch.device(device).type == "meta"
    return torch.empty(*shape, dtype=dtype, device=device) if on_meta else None


def _like(x: Tensor, *_: Any) -> Tensor | None:
    return x.new_empty(x.shape) if x.is_meta else None


def _times(x: Tensor, other: Any) -> Tensor | None:
    return _like(x) if isinstance(other, int) and x.dtype is not torch.bool else None


def _compared(x: Tensor, other: Any) -> Tensor | None:
    return x.new_empty(x.shape, dtype=torch.bool) if x.is_meta and isinstance(other, (int, float)) else None


def _same(x: Tensor, other: Any) -> Tensor | None:
    return x if x.is_meta else None


_RULES: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.where: _where,
    torch.arange: _arange,
    torch.zeros: _zeros,
    Tensor.__getitem__: _index,
    Tensor.__neg__: _like,
    Tensor.__rshift__: _like,
    Tensor.mul: _times,
    Tensor.div_: _same,
    Tensor.sub_: _same,
    **dict.fromkeys((Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, Tensor.eq, Tensor.ne), _compared),
}
