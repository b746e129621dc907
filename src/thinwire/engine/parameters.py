"""Find and name the parameters that a GradientSync manages, and check them against the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from thinwire.core.program import Method


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
        return f"{_kind(p)}{strides}{' dense' if self.dense else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless the script has set another ``grad_dtype``."""
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


def model_facts(model: nn.Module, managed: Iterable[Managed]) -> dict[str, Any]:
    """Return the facts about a model that must be equal on all ranks."""
    kinds = {m.name: m.description for m in managed}
    return {
        "parameters": kinds,
        "parameters in order": list(kinds),
        "frozen": [f"{one.name} {_kind(one.tensor)}" for one in frozen_of(model, (m.name for m in managed))],
        "buffers": [f"{one.name} {_kind(one.tensor)}" for one in buffers_of(model)],
    }


def _kind(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


class Named:
    """A buffer or frozen parameter, which is known by its name: a script may put another tensor in its place.

    Attributes:
        name: of the tensor in the model.
        module: that has it.
        tensor: the last that had the shape and dtype of the first.
    """

    def __init__(self, name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        self.name, self.module, self.tensor = name, module, tensor

    def now(self) -> torch.Tensor:
        """Return the tensor that the module has now, unless its shape or dtype has changed: then the last one.

        One that was made under ``inference_mode``, which nothing can change any more, gets a copy in its place.
        """
        key = self.name.rpartition(".")[2]
        found = getattr(self.module, key, None)
        if isinstance(found, torch.Tensor) and found.is_inference():
            found = found.clone()
            setattr(self.module, key, found)
        if isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (self.tensor.shape, self.tensor.dtype):
            self.tensor = found
        return self.tensor


def ignored(model: nn.Module) -> set[str]:
    """Return names of parameters and buffers that are left out, as DDP leaves them out."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in(model: nn.Module, names: Iterable[str]) -> None:
    """Leave these parameters and buffers out, and no others. Raise ``ValueError`` for an unknown name."""
    chosen = {names} if isinstance(names, str) else {*names}
    known = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named()}
    if unknown := sorted(chosen - known):
        raise ValueError(f"ignore: the model has no parameter or buffer {unknown[0]!r}")
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, chosen)


def buffers_of(model: nn.Module) -> list[Named]:
    """Return the buffers that are kept equal.

    Raises:
        TypeError: one of them cannot be sent; names it.
    """
    left_out, places = ignored(model), dict[tuple[int, str], Named]()  # a tensor may be in several places
    for name, x in model.named_buffers(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if name not in left_out:
            places.setdefault((id(module), key), Named(name, module, x))
    found = list(places.values())
    for one in found:
        x = one.now()
        if x.layout is not torch.strided or x.is_quantized or x.is_meta:
            raise TypeError(
                f"the buffer {one.name} ({x.layout}, {x.dtype}, on {x.device}) cannot be sent: leave it out by attach("
                f'..., ignore=["{one.name}"])'
            )
    return found


def frozen_of(model: nn.Module, managed: Iterable[str]) -> list[Named]:
    """Return the parameters that are not managed, except ignored ones."""
    others = {*managed, *ignored(model)}
    found = ((name, p) for name, p in model.named_parameters() if name not in others)
    return [Named(name, model.get_submodule(name.rpartition(".")[0]), p) for name, p in found]


def sent_at_start(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers that ``attach`` makes equal."""
    left_out = ignored(model)
    yield from (p for name, p in model.named_parameters() if name not in left_out)
    yield from (one.tensor for one in buffers_of(model))


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
                f"{name} ({type(module).__name__}) gives sparse gradients, which thinwire does not exchange: build it "
                "with sparse=False"
            )
    found: list[Managed] = []
    left_out = ignored(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise TypeError(f"{name} has no values yet: make them (by a first forward, or to_empty), and attach then")
        if not parameter.requires_grad or name in left_out:
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
