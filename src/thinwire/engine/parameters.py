"""Find and name the parameters that a GradientSync manages, and check them against the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thinwire.program import Method


@dataclass(frozen=True, eq=False)
class Managed:
    """One trainable parameter, as it was at ``attach``. ``dense``: not compressed; it goes into S-SGD buckets."""

    index: int
    name: str
    parameter: nn.Parameter
    dense: bool
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.parameter.dtype)
        object.__setattr__(self, "device", self.parameter.device)

    @property
    def description(self) -> str:
        """What ranks compare: shape, dtype, strides unless contiguous, and whether it stays dense."""
        p = self.parameter
        strides = "" if p.is_contiguous() else f" strides {list(p.stride())}"
        return f"{list(p.shape)} {p.dtype}{strides}{' dense' if self.dense else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


def model_facts(model: nn.Module, managed: Iterable[Managed]) -> dict[str, Any]:
    """Return the facts about a model that must be equal on all ranks."""
    kinds = {m.name: m.description for m in managed}
    return {
        "parameters": kinds,
        "parameters in order": list(kinds),
        "frozen": [f"{n} {list(p.shape)}" for n, p in model.named_parameters() if not p.requires_grad],
        "buffers": [f"{n} {list(b.shape)}" for n, b in model.named_buffers()],
    }


DenseRule = str | Callable[[str, nn.Parameter], bool]


def managed_parameters(model: nn.Module, method: Method, keep_dense: DenseRule) -> list[Managed]:
    """Return all trainable parameters in order of registration; shared ones once.

    Raises:
        ValueError: there is none, or ``keep_dense`` has no known value.
        TypeError: a complex parameter, one that is sharded over ranks, or an embedding with sparse gradients.
    """
    if not (callable(keep_dense) or keep_dense in ("auto", "none")):
        raise ValueError(f'keep_dense={keep_dense!r} must be "auto", "none" or a function (name, parameter) -> bool')
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    embedded = {key for key, module in owners.items() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise TypeError(
                f"{name} gives sparse gradients, which thinwire does not exchange: build it with sparse=False"
            )
    found: list[Managed] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex():
            raise TypeError(f"{name} is complex; thinwire exchanges real floating-point gradients only")
        if hasattr(parameter, "device_mesh"):
            raise TypeError(
                f"{name} is sharded over ranks (a DTensor): under FSDP2 use thinwire.adapters.fsdp2.attach; models "
                "sharded otherwise are not supported"
            )
        if callable(keep_dense):
            keep = bool(keep_dense(name, parameter))
        else:
            keep = keep_dense == "auto" and method.dense(name, tuple(parameter.shape), id(parameter) in embedded)
        found.append(Managed(len(found), name, parameter, keep))
    if not found:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on what should be trained")
    devices = {m.parameter.device for m in found}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on several devices ({', '.join(map(str, devices))}); they must be on one"
        )
    return found


def check_optimizers(managed: Iterable[Managed], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ``ValueError`` unless the optimizers, if there are any, own every managed parameter."""
    optimizers = list(optimizers)
    if not optimizers:
        return
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [m.name for m in managed if id(m.parameter) not in owned]
    if missing:
        raise ValueError(
            f"the optimizer does not own {len(missing)} of the model's trainable parameters, {', '.join(missing[:3])}: "
            "build it from this model's parameters (after moving or copying the model), pass a list of all optimizers, "
            "or freeze what is not trained"
        )
