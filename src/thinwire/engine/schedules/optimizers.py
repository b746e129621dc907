"""Run the user's optimizer on some of its parameters, with the hyper-parameters of an earlier moment; or lock it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_Groups = list[dict[str, Any]]


class OptimizerSnapshot:
    """An optimizer as it was when ``step()`` was called; ``update`` does to some parameters what that step would do.

    It uses the optimizer's own ``state``, so that checkpoints are what they would be. (A plain ``copy.copy`` would call
    ``__getstate__``, which drops what an optimizer keeps besides state and groups.)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._copy.__dict__[hooks] = OrderedDict()
        for extra in ("grad_scale", "found_inf"):  # a scaler sets these on fused optimizers for this call only
            if isinstance(value := self._copy.__dict__.get(extra), Tensor):
                self._copy.__dict__[extra] = value.clone()
        self._groups: _Groups = [
            {key: _kept(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        step: Callable[..., Any] = type(optimizer).step
        # Skip the wrapper: it calls hooks that are meant for the user's own call.
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    def update(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Step the parameters, given by the number of their group; their ``.grad`` must be there."""
        self._copy.param_groups = [{**self._groups[number], "params": list(p)} for number, p in parameters.items()]
        self._step(self._copy)


class ParamGroupLock:
    """Keeps parameters from being added to an optimizer, until removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.__dict__["add_param_group"] = self._refuse

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError("add_param_group: call close() on the GradientSync first, and attach again afterwards")

    def remove(self) -> None:
        self._optimizer.__dict__.pop("add_param_group", None)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
