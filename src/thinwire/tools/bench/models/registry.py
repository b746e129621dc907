"""Names of models -> workloads. A user's ``module:function`` is a name too."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from thinwire.tools.bench.words import check_module, check_options, load_function, nearest, split_options, told

if TYPE_CHECKING:
    import torch
    from torch import nn

    from thinwire.tools.bench.models.workload import Workload

BUILT_IN = {
    "chargpt": "text:chargpt",
    "mlp": "synthetic:mlp",
    "resnet18": "synthetic:resnet18",
    "bert-small": "text:bert_small",
    "digits": "digits:build",
    "teacher": "teacher:build",
}


def check_model(text: str) -> None:
    """Raise ``ValueError`` for an unknown model or option; imports the model's file, but builds nothing."""
    name, options = split_options(text)
    check_options(f"model {name!r}", _function(name), options, ours=name in BUILT_IN)


def build_model(text: str, seed: int = 0, device: torch.device | None = None) -> Workload:
    """Build ``"chargpt"``, ``"mlp:width=512"`` or ``"my_module:my_function"`` from a seed, of torch, random and numpy.

    A user's function returns a model and its data (``_PARTS``), ``(model, loss)`` with ``loss(model, step, rank) ->
    Tensor``, or a ``Workload``. The model is moved to ``device``, and so are batches; such a loss moves its own.
    """
    import numpy
    import torch

    check_model(text)
    name, options = split_options(text)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    function = _function(name)
    with told(f"model {name!r}"):
        built = function(**options)
    workload = _as_workload(name, built)
    if device is not None:
        elsewhere = {p.device.type for p in workload.model.parameters()} - {"cpu", device.type}
        if elsewhere:
            there = elsewhere.pop()
            raise ValueError(f"model {name!r} is on {there}: leave it on the CPU, and say --device where ranks compute")
        workload.model.to(device)
    return workload


def loss_of(workload: Workload, rank: int) -> Callable[[nn.Module, int], Any]:
    """Return (model, step) -> loss on ``rank``'s batches; errors in user code are reported in one sentence."""

    def loss(model: nn.Module, step: int) -> Any:
        with told(f"the loss of {workload.name!r}"):
            return workload.loss(model, step, rank)

    return loss


def _function(name: str) -> Callable[..., Any]:
    from torch import nn

    if name in BUILT_IN:
        module, _, built = BUILT_IN[name].partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"thinwire.tools.bench.models.{module}"), built)
        return found
    if ":" not in name:
        check_module(name, "model")
        raise ValueError(f"unknown model {name!r}; {nearest(name, BUILT_IN)}, or module:function of your own")
    function = load_function(name, "model")
    if isinstance(function, nn.Module):
        raise ValueError(f"model {name!r} is a module, not a function: name a function that returns (model, loss)")
    return function


def _as_workload(name: str, built: Any) -> Workload:
    import torch

    from thinwire.tools.bench.models.loaders import check_data, losses
    from thinwire.tools.bench.models.workload import Workload

    if isinstance(built, Workload):
        return built
    given = _given(built)
    if unknown := [key for key in given if key not in _PARTS]:
        raise ValueError(f"model {name!r} returns {unknown[0]!r}; {nearest(str(unknown[0]), _PARTS)}")
    model, data, loss, held_out, optimizer = map(given.get, _PARTS)
    if not isinstance(model, torch.nn.Module) or data is None:
        raise ValueError(
            f"model {name!r} must return (model, DataLoader), (model, DataLoader, loss) with loss(model, batch) -> "
            f"Tensor, or (model, loss) with loss(model, step, rank) -> Tensor, not {_kind(built)}"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model {name!r} has no parameter to train: set requires_grad=True on what should be trained")
    for key, one in (("loss", loss), ("optimizer", optimizer)):
        if not (one is None or callable(one) or (key == "optimizer" and isinstance(one, torch.optim.Optimizer))):
            what = "a function (model, batch)" if key == "loss" else "an optimizer, or a function (model) -> optimizer"
            raise ValueError(f"model {name!r}: its {key} must be {what}, not {type(one).__name__}")
    for one in (data, held_out):
        if not (one is None or callable(one)):
            check_data(name, one)
    of_steps = isinstance(built, tuple) and len(built) == 2 and _is_of_steps(data)
    trained = data if of_steps else losses(name, data, loss)[0]
    make = optimizer if callable(optimizer) else lambda m: optimizer or torch.optim.SGD(m.parameters(), lr=0.01)
    evaluate = None if held_out is None else losses(name, held_out, loss)[1]
    return Workload(name, model, trained, make, f"{name} of your own", evaluate)


_PARTS = ("model", "data", "loss", "held_out", "optimizer")
"""What a user's function returns by name, the first two or three also as a tuple."""


def _given(built: Any) -> Mapping[str, Any]:
    short = isinstance(built, tuple) and len(built) in (2, 3)
    return built if isinstance(built, Mapping) else dict(zip(_PARTS, built)) if short else {}


def model_in(built: Any) -> Any:
    """Return the model of what a user's function has returned, in any form: itself, a ``Workload``, or parts."""
    from torch import nn

    return built if isinstance(built, nn.Module) else getattr(built, "model", _given(built).get("model"))


def _is_of_steps(function: Any) -> bool:
    """Return whether this is ``loss(model, step, rank)``; the first argument of a function for data is ``rank``."""
    return callable(function) and next(iter(inspect.signature(function).parameters), "") != "rank"


def _kind(built: Any) -> str:
    kinds = [type(one).__name__ for one in built] if isinstance(built, tuple) else []
    return f"({', '.join(kinds)})" if kinds else "None" if built is None else type(built).__name__
