"""Hooks on an attached model's modules that a copied or pickled model does not have, and where autograd is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread is in; -1 outside. (torch has no public call for it.)"""
_nothing = nullcontext().__exit__  # takes anything, does nothing, and pickles without thinwire


class ModuleHook(functools.partial):  # type: ignore[type-arg]
    """Like ``functools.partial``; copied or unpickled, by modules that do this in their own way, it does nothing."""

    @property
    def __name__(self) -> str:
        raise AttributeError("the model is attached by thinwire: script a copy of it, or call close() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class WithoutHooks:
    """Keeps a module's hooks of this package out of its copies and pickles, until removed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.__dict__["__getstate__"] = functools.partial(_state, weakref.ref(module))

    def remove(self) -> None:
        self._module.__dict__.pop("__getstate__", None)


def _state(reference: weakref.ref[nn.Module]) -> Any:
    """Return what a module itself would give to be copied or pickled, without hooks."""
    module: Any = reference()
    of_class = getattr(type(module), "__getstate__", None)  # every class has it since Python 3.11
    state = module.__dict__ if of_class is None else of_class(module)
    if not isinstance(state, dict):
        return state
    state = {key: value for key, value in state.items() if key != "__getstate__"}
    for key, value in state.items():
        if key.endswith("_hooks") and isinstance(value, dict):
            state[key] = type(value)((k, hook) for k, hook in value.items() if not isinstance(hook, ModuleHook))
    return state
