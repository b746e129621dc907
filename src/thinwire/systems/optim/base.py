"""What LARS and LAMB share: groups, fp32 state and masters, the list of skipped tensors, the scaler, the ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_choice, check_number
from thinwire.core.program import working_dtype
from thinwire.engine.state.scaler import refuse_scaled
from thinwire.engine.sync import GradientSync
from thinwire.systems.optim.norms import Layers
from thinwire.systems.optim.pto import NormSharding, ParallelStats


@dataclass
class GroupTensors:
    """The tensors of one group that have a gradient."""

    group: dict[str, Any]  # its options
    parameters: list[Tensor]  # the model's
    weights: list[Tensor]  # what is updated: the parameters, or their fp32 masters
    gradients: list[Tensor]  # in the working dtype, not to be edited
    states: list[dict[str, Any]]
    adapted: list[int]  # indices
    skipped: list[int]
    updates: list[Tensor] = field(default_factory=list)  # LAMB's, before their ratio
    chosen: list[int] = field(default_factory=list)  # indices of LAMB's that have a ratio

    def part(self, indices: Sequence[int]) -> GroupTensors:
        """Return some of its tensors, all of them adapted."""
        if len(indices) == len(self.parameters):
            return self
        p, w, g = ([some[i] for i in indices] for some in (self.parameters, self.weights, self.gradients))
        return GroupTensors(self.group, p, w, g, [self.states[i] for i in indices], list(range(len(indices))), [])

    def held(self, name: str) -> list[Tensor]:
        """Return a field of each tensor's state; zeros if it is new."""
        for weight, state in zip(self.weights, self.states):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]


class LayerWise(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose step sizes depend on norms of whole tensors."""

    def __init__(self, params: Any, defaults: dict[str, Any], sharing: NormSharding, scaler: Any) -> None:
        self._sharing, self._scaler = sharing, scaler
        super().__init__(params, defaults)
        self.register_step_pre_hook(_before_step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer; it belongs to no scaler and no ranks."""
        super().__setstate__(state)
        if "_sharing" not in self.__dict__:
            self._sharing, self._scaler = NormSharding(), None
            self.register_step_pre_hook(_before_step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            for name in ("lr", "weight_decay"):
                check_number(name, group[name], least=0)
            check_choice("skip", group["skip"], ("1d", "all", None))
            self.check_group(group)
            for p in group["params"]:
                _check_dtype(type(self).__name__, p)
            kinds = {(p.device, working_dtype(p.dtype)) for g in self.param_groups for p in g["params"]}
            if len(kinds) > 1:
                found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
                raise ValueError(f"all parameters must be on one device, and all or none fp64: got {found}")
        except BaseException:
            self.param_groups.pop()
            raise

    @abc.abstractmethod
    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` if an option of this optimizer is out of range."""

    @abc.abstractmethod
    def prepare(self, works: Sequence[GroupTensors]) -> list[Layers]:
        """Return, for each group, the layers whose ratios ``update`` needs; may be empty."""

    @abc.abstractmethod
    def update(self, work: GroupTensors, ratios: Tensor | None) -> None:
        """Update the weights and state of one group. ``ratios``: of the layers that ``prepare`` returned."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; with ``parallel`` all ranks must call it.

        Raises:
            RuntimeError: the gradients still contain a loss scale, or are sparse; or, with ``parallel`` on CPUs, ranks
                have gradients of different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            works = [work for work in map(self._work, self.param_groups) if work.parameters]
            layers = self.prepare(works)
            held = b""
            if self._sharing.parallel is not None:
                held = bytes(p.grad is not None for group in self.param_groups for p in group["params"])
            ratios = iter(self._sharing.ratios([some for some in layers if len(some)], held))
            for work, some in zip(works, layers):
                self.update(work, next(ratios) if len(some) else None)
                if copies := [(p, w) for p, w in zip(work.parameters, work.weights) if p is not w]:
                    torch._foreach_copy_([p for p, _ in copies], [w for _, w in copies])
        return loss

    def _work(self, group: dict[str, Any]) -> GroupTensors:
        parameters = [p for p in group["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: use Embedding(sparse=False)")
        states = [self.state[p] for p in parameters]
        weights = [self._weight(p, state) for p, state in zip(parameters, states)]
        gradients = [p.grad.to(w.dtype) for p, w in zip(parameters, weights)]
        skip = group["skip"]
        left = [skip == "all" or (skip == "1d" and p.dim() <= 1) for p in parameters]
        adapted, skipped = ([i for i, out in enumerate(left) if out is wanted] for wanted in (False, True))
        return GroupTensors(group, parameters, weights, gradients, states, adapted, skipped)

    def _weight(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the parameter, or its master: made when first needed, renewed where other code wrote the parameter."""
        dtype = working_dtype(parameter.dtype)
        if parameter.dtype == dtype:
            return parameter
        if "master" not in state:
            state["master"] = parameter.detach().to(dtype)
        master: Tensor = state["master"]
        same = master.to(parameter.dtype) == parameter
        return master.copy_(torch.where(same, master, parameter.to(dtype)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as ``torch.optim`` does, but keep the state's own dtype: fp32 for bf16 parameters too."""
        super().load_state_dict(state_dict)
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, owners):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):  # cloned: torch lets it share memory with what it was loaded from
                    device = value.device if key == "step" else p.device
                    self.state[p][key] = value.detach().to(device, copy=True)

    def attached(self, sync: GradientSync, scaler: Any) -> _Attached:
        """Take the ranks to share norms with, and the scaler, from ``thinwire.attach`` until the handle is removed."""
        self._sharing.attach(sync)
        handle = _Attached(self, self._scaler)
        if scaler is not None:
            self._scaler = scaler
        return handle

    def stats(self) -> ParallelStats:
        return self._sharing.stats


class _Attached:
    def __init__(self, optimizer: LayerWise, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler

    def remove(self) -> None:
        self._optimizer._sharing.detach()
        self._optimizer._scaler = self._scaler


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    refuse_scaled(getattr(optimizer, "_scaler", None), optimizer)


def _check_dtype(name: str, parameter: Tensor) -> None:
    if parameter.dtype == torch.float16:
        raise TypeError(
            f"{name} does not accept fp16 parameters: keep parameters fp32 and use autocast; GradScaler refuses to "
            "unscale fp16 gradients"
        )
    if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise TypeError(f"{name} accepts fp32, fp64 and bf16 parameters, not {parameter.dtype}")
