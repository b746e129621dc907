"""What a decoupled step leaves for ``step()`` and the next forward.

``DeferredGrad`` is what ``.grad`` is between ``backward()`` and ``step()``: a tensor that cannot be read. It has the
right shape, dtype and device, but stores a single element. A ``GradScaler`` works on it as on any gradient. Everything
else raises an error, because the values are not there.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.core.program import Method
from thinwire.core.program.ops import Paused
from thinwire.engine.buckets import Memory
from thinwire.engine.parameters import gradient_dtype

_REMEDY = (
    "this gradient is deferred: after backward() its parts are spread over all ranks until optimizer.step(). Clip with "
    "sync.clip_grad_norm_(...), or attach with decoupled=False (S-SGD) if gradients are read or edited"
)
_ATTRIBUTES = {
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_sparse", "is_sparse_csr", "is_cuda", "is_meta",
        "is_quantized", "is_nested", "is_mkldnn", "requires_grad", "grad_fn", "itemsize", "nbytes", "_version",
    )
}  # fmt: skip
_QUESTIONS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.ndimension, Tensor.get_device,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
_SAME = {Tensor.detach_, Tensor.requires_grad_}  # zero_grad calls them
_ZERO = {Tensor.zero_, torch._foreach_zero_}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_

Change = Callable[[list[Tensor]], None]
"""What to do in place to gradients once they are there."""


class DeferredGrad(Tensor):
    finite: Callable[[], Tensor] | None  # tells whether all of the step's are, on all ranks (0-dim); None: unchecked
    changes: list[Change]  # what the scaler and clipping have asked for, in order
    zeroed: bool  # by ``zero_grad(set_to_none=False)``

    @staticmethod
    def __new__(cls, parameter: Tensor) -> DeferredGrad:
        one = torch.zeros((), dtype=gradient_dtype(parameter), device=parameter.device)
        made: DeferredGrad = Tensor._make_subclass(cls, one.expand(parameter.shape))
        made.renew(None)
        return made

    def renew(self, finite: Callable[[], Tensor] | None) -> None:
        self.finite, self.changes, self.zeroed = finite, [], False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTRIBUTES or func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _SAME:
            return args[0]
        if func in _ZERO:
            given = [args[0]] if isinstance(args[0], Tensor) else args[0]
            deferred, others = _sort(given)
            for grad in deferred:
                grad.zeroed = True
            for x in others:
                x.zero_()
            return args[0]
        if func is _UNSCALE:
            return _unscale(*args)
        raise RuntimeError(_REMEDY)


def _sort(given: Iterable[Tensor]) -> tuple[list[DeferredGrad], list[Tensor]]:
    deferred, others = [], []
    for x in given:
        if isinstance(x, DeferredGrad):
            deferred.append(x)
        else:
            others.append(x)
    return deferred, others


def _unscale(given: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Act as ``GradScaler.unscale_`` on gradients: report now whether all are finite, and defer the multiplication."""
    deferred, others = _sort(given)
    if others:
        _UNSCALE(others, found_inf, inverse_scale)
    inverse = inverse_scale.clone()

    def change(gradients: list[Tensor]) -> None:
        _UNSCALE(gradients, torch.zeros_like(found_inf), inverse)

    for grad in deferred:
        grad.changes.append(change)
    finite = deferred[0].finite
    if finite is None:
        raise RuntimeError("a GradScaler must see non-finite gradients: leave out check_finite=False")
    found_inf.copy_(torch.maximum(found_inf, (~finite()).to(found_inf.dtype)))


class OptimizerSnapshot:
    """An optimizer as it was when ``step()`` was called; ``update`` does to some parameters what that step would do.

    It shares the optimizer's ``state``. (``copy.copy`` would drop what is kept besides state and groups.)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._copy.__dict__[hooks] = OrderedDict()
        for extra in ("grad_scale", "found_inf"):  # a scaler sets these on fused optimizers for this call only
            if isinstance(value := self._copy.__dict__.get(extra), Tensor):
                self._copy.__dict__[extra] = value.clone()
        self._groups: list[dict[str, Any]] = [
            {
                key: x.detach().clone() if isinstance(x, Tensor) else copy.copy(x)
                for key, x in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]
        step: Callable[..., Any] = type(optimizer).step
        # Skip the wrapper: it calls hooks that are meant for the user's own call.
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    def update(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Step the parameters, given by the number of their group; their ``.grad`` must be there."""
        self._copy.param_groups = [{**self._groups[number], "params": list(p)} for number, p in parameters.items()]
        self._step(self._copy)


class ParamGroupLock:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.__dict__["add_param_group"] = self._refuse

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError("add_param_group: call close() on the GradientSync first, and attach again afterwards")

    def remove(self) -> None:
        self._optimizer.__dict__.pop("add_param_group", None)


@dataclass
class DeferredUpdates:
    """This rank's part of each bucket of a step: its memory, its method, its paused program."""

    memories: list[Memory]
    methods: list[Method]
    paused: Mapping[int, Paused]
    inline: list[int]  # buckets whose programs only receive and copy
    where: list[tuple[int, int]]  # for each parameter, its bucket and its place in it
    gathering: bool = False  # all-gathers have been issued
    received: set[int] = field(default_factory=set)  # buckets that were waited for


@dataclass(eq=False)
class DeferredUpdate:
    """What one optimizer updates of a pending bucket: parameter indices by the number of their group."""

    frozen: OptimizerSnapshot
    groups: dict[int, list[int]]

    @property
    def indices(self) -> list[int]:
        return [i for group in self.groups.values() for i in group]
