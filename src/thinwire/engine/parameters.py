"""The parameters and buffers of a model: which are managed, what they are called, which follow rank 0's."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from thinwire.core.collectives.socket_stream import memory_of
from thinwire.core.program import Method
from thinwire.core.program.bucket import local_shard
from thinwire.engine.ranks.agreement import bytes_of, put_bytes
from thinwire.engine.ranks.communicator import Communicator

logger = logging.getLogger("thinwire")
DenseRule = str | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, eq=False)
class ManagedParameter:
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
        p = local_shard(self.parameter)
        strides = "" if p.is_contiguous() else f" strides {list(p.stride())}"
        return f"{_kind(p)}{strides}{' dense' if self.dense else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(local_shard(self.parameter).shape)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless the script has set another ``grad_dtype``."""
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


def model_facts(
    model: nn.Module, managed: Iterable[ManagedParameter], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> dict[str, Any]:
    """Return what ranks must have alike: parameters and buffers, and the optimizers' options, such as rates."""
    kinds = {m.name: m.description for m in managed}
    options = {
        f"{type(optimizer).__name__}, parameter group {place}, {key}": value.item() if torch.is_tensor(value) else value
        for optimizer in optimizers
        for place, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, (bool, int, float, str, tuple)) or (torch.is_tensor(value) and value.numel() == 1)
    }
    return options | {
        "parameters": kinds,
        "parameters in order": list(kinds),
        "frozen": [f"{one.name} {_kind(one.tensor)}" for one in frozen_of(model, (m.name for m in managed))],
        "buffers": [f"{one.name} {_kind(one.tensor)}" for one in buffers_of(model)],
    }


def _kind(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


class Named:
    """A buffer or frozen parameter (here: its shard), known by its name: a script may put another in its place."""

    def __init__(self, name: str, model: nn.Module, tensor: torch.Tensor) -> None:
        path, _, self.key = name.rpartition(".")
        self.name, self.module, self.tensor = name, model.get_submodule(path), local_shard(tensor)

    @property
    def statistic(self) -> bool:
        """Whether this is a running statistic, whose mean over ranks is one, too."""
        return isinstance(self.module, _NormBase) or self.key.startswith("running_")

    def now(self) -> torch.Tensor:
        """Return what the module has, or the last that fitted; an inference tensor is replaced by a copy there."""
        found = getattr(self.module, self.key, None)
        if isinstance(found, torch.Tensor) and found.is_inference():
            found = found.clone()
            setattr(self.module, self.key, found)
        if isinstance(found, torch.Tensor):
            found = local_shard(found)
            if (found.shape, found.dtype) == (self.tensor.shape, self.tensor.dtype):
                self.tensor = found
        return self.tensor


def ignored(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def private(model: nn.Module, *, buffers: bool) -> dict[str, Any]:
    """Return those entries of a state dict that each rank keeps to itself. ``buffers``: all of them are.

    They go by identity: checkpoint wrappers give them other names than the model does.
    """
    left_out = ignored(model)
    own = {id(x) for name, x in model.named_parameters(remove_duplicate=False) if name in left_out}
    own |= {id(x) for name, x in model.named_buffers(remove_duplicate=False) if buffers or name in left_out}
    return {key: x for key, x in model.state_dict(keep_vars=True).items() if id(x) in own}


def ignore_in(model: nn.Module, names: Iterable[str]) -> None:
    """Leave these parameters and buffers out, and no others. Raise ``ValueError`` for an unknown name."""
    chosen = {names} if isinstance(names, str) else {*names}
    known = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named()}
    if unknown := sorted(chosen - known):
        raise ValueError(f"ignore: the model has no parameter or buffer {unknown[0]!r}")
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, chosen)


def buffers_of(model: nn.Module) -> list[Named]:
    """Return the buffers that are kept equal; refuse those that cannot be sent."""
    left_out, places = ignored(model), dict[tuple[int, str], Named]()  # a tensor may be in several places
    for name, x in model.named_buffers(remove_duplicate=False):
        one = Named(name, model, x)
        if name not in left_out:
            places.setdefault((id(one.module), one.key), one)
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
    others = {*managed, *ignored(model)}
    return [Named(name, model, p) for name, p in model.named_parameters() if name not in others]


def sent_at_start(model: nn.Module) -> Iterator[torch.Tensor]:
    left_out = ignored(model)
    yield from (local_shard(p) for name, p in model.named_parameters() if name not in left_out)
    yield from (one.tensor for one in buffers_of(model))


def managed_parameters(
    model: nn.Module, method: Method, keep_dense: DenseRule, *, sharded: bool = False
) -> list[ManagedParameter]:
    """Return all trainable parameters in order of registration; shared ones once. Refuse what cannot be exchanged."""
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
    found: list[ManagedParameter] = []
    left_out = ignored(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise TypeError(f"{name} has no values yet: make them (by a first forward, or to_empty), and attach then")
        if not parameter.requires_grad or name in left_out:
            continue
        if parameter.is_complex():
            raise TypeError(f"{name} is complex; thinwire exchanges real floating-point gradients only")
        if hasattr(parameter, "device_mesh") and not sharded:
            raise TypeError(
                f"{name} is sharded over ranks (a DTensor): under FSDP2 use thinwire.adapters.fsdp2.attach; models "
                "sharded otherwise are not supported"
            )
        if callable(keep_dense):
            keep = bool(keep_dense(name, parameter))
        else:
            keep = keep_dense == "auto" and method.dense(name, tuple(parameter.shape), id(parameter) in embedded)
        found.append(ManagedParameter(len(found), name, parameter, keep))
    if not found:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on what should be trained")
    devices = {m.parameter.device for m in found}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on several devices ({', '.join(map(str, devices))}); they must be on one"
        )
    return found


def check_optimizers(managed: Iterable[ManagedParameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
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


class Buffers:
    """Keeps buffers that change in training, above all BatchNorm's statistics, equal to rank 0's, as DDP does.

    DDP sends them before a forward; here they travel during backward, so one rank may evaluate alone. Those that do not
    change in the first step (masks, tables) were made equal by ``attach``, and stay.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._comm = model, communicator
        self._all = [one for one in buffers_of(model) if one.tensor.numel()]
        self._first = [b"" if _norm(one) else self._print(one) for one in self._all]
        self._follow: list[Named] | None = None  # those that are sent; None: not known yet
        self._still: list[tuple[Named, Tensor, int]] = []  # the others, as they were: tensor, version
        self._wait: Callable[[], Tensor] | None = None
        self.idle = False  # no buffer is sent or looked at any more

    def send(self) -> None:
        if self._follow:
            self._wait = self._comm.broadcast_later(torch.cat([bytes_of(one.now()) for one in self._follow]))

    @torch.no_grad()
    def receive(self) -> None:
        if self._follow is None:
            self._learn()
            self.send()
        if self._wait is not None:
            message, self._wait, begin = self._wait(), None, 0
            for one in self._follow or ():
                x = one.now()
                piece = message[begin : begin + x.nbytes]
                begin += x.nbytes
                if not x.is_cuda and torch.equal(piece, bytes_of(x)):  # on CUDA the host would wait for the result
                    continue
                if _norm(one) or x.is_cuda:  # like BatchNorm itself, leave the version: autograd may have saved it
                    put_bytes(x, piece, quietly=True)
                elif self._comm.rank:
                    put_bytes(x, piece)
        self._tell_late()
        self.idle = not self._follow and not self._still

    def _learn(self) -> None:
        mine = bytes(_norm(one) or self._print(one) != first for one, first in zip(self._all, self._first))
        everyone = self._comm.gather(mine) if mine else []
        travels = [any(row[place] for row in everyone) for place in range(len(mine))]
        self._follow = [one for one, goes in zip(self._all, travels) if goes]
        resting = [one for one, goes in zip(self._all, travels) if not goes]
        self._still = [(one, one.now(), one.tensor._version) for one in resting]
        self._first = []
        known = {one.name for one in self._all}
        if late := [one.name for one in buffers_of(self._model) if one.tensor.numel() and one.name not in known]:
            logger.warning(
                "thinwire: the buffer %s was not there at attach, so it is not kept equal across the ranks; call "
                "close() and attach again from here on", late[0],
            )  # fmt: skip

    def _tell_late(self) -> None:
        for one, was, version in self._still:
            if one.now() is not was or was._version != version:
                logger.warning(
                    "thinwire: the buffer %s has changed, although it did not in the first step, so it is not kept "
                    "equal across the ranks; call close() and attach again from here on", one.name,
                )  # fmt: skip
                self._still = []
                return

    def _print(self, one: Named) -> object:
        """Return what changes with a buffer. On CPU a digest: values can change without a version."""
        x = one.now()
        if self._comm.device.type != "cpu":
            return id(x), x._version
        return hashlib.blake2b(memory_of(bytes_of(x)), digest_size=16).digest()


def _norm(one: Named) -> bool:
    return isinstance(one.module, _NormBase)
