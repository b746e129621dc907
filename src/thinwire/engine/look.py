"""Slow look-ahead: gradients are taken a little further along the way that all ranks' weights have gone together.

x <- x + beta s                                                  before a step's first training forward
s <- gamma^h s + (1 - gamma^h) (the common weights' change) / h  h steps after the last time; looks are in the change

The common weights are those that are equal on all ranks, so s is too, and nothing is sent for it. With local steps they
are the outer weights, which change when a round is merged; otherwise a step changes them. In the end a direction that
stays is taken 1 / (1 - beta) times as far.

The look is made just before a forward and is a part of the next step, so evaluations (``model.eval()``, or without
gradients) and files that are saved between steps hold weights that have not been moved ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.core.checks import check_number
from thinwire.core.program import working_dtype
from thinwire.engine.hooks import ModuleHook, WithoutHooks, current_task


@dataclass(frozen=True)
class Look:
    """Slow look-ahead, for local steps and for methods that are not decoupled; nothing is sent for it.

    Paper: EMA-Nesterov, arXiv 2605.25395, there for plain data-parallel training, and so once a step. With local steps
    it follows the outer weights, once a round.

    It wants the learning rate that is best without it, or a lower one, down to 1 - ``beta`` times that; at the largest
    stable rate it may diverge.

    Args:
        beta: how far to look, in steps of the slow mean; 0 is none.
        gamma: the share of the slow mean that is left after a step: 0.97 is a mean over about 33 steps.
    """

    beta: float = 0.5
    gamma: float = 0.97

    def __post_init__(self) -> None:
        check_number("Look: beta", self.beta, least=0, below=1)
        check_number("Look: gamma", self.gamma, least=0, below=1)

    @torch.no_grad()
    def ahead(self, weights: Sequence[Tensor], slow: Sequence[Tensor], steps: int = 1) -> None:
        """Move weights ahead, as so many steps do."""
        if weights:
            torch._foreach_add_([x.detach() for x in weights], list(slow), alpha=self.beta * steps)

    @torch.no_grad()
    def follow(self, slow: list[Tensor], change: list[Tensor], steps: int) -> None:
        """Take a change of the common weights in ``steps`` steps into the slow mean."""
        left = self.gamma**steps
        torch._foreach_mul_(slow, left)
        torch._foreach_add_(slow, change, alpha=(1 - left) / steps)


def as_look(look: Any) -> Look | None:
    """Return a look as it was given, or of its beta alone."""
    if look is None or isinstance(look, Look):
        return look
    if isinstance(look, bool) or not isinstance(look, (int, float)):
        raise TypeError(f"look={look!r} must be a thinwire.Look, such as thinwire.Look(beta=0.5), its beta, or None")
    return Look(look)


class BeforeForward:
    """Calls ``do`` once ``due`` is set: before the next forward of a model, or of a part of it, that trains."""

    def __init__(self, model: nn.Module, do: Callable[[], None]) -> None:
        self.due, self._do, self._handles = True, do, list[Any]()
        self._begins = torch.compiler.disable(self._outside)
        for module in model.modules():
            if module is model or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(WithoutHooks(module))
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.due and module.training and torch.is_grad_enabled():
            self._begins()

    def _outside(self) -> None:
        if current_task() == -1:  # not a forward that is rerun inside backward
            self.due = False
            self._do()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class LookAhead:
    """The look of a model whose ranks make equal steps. A companion of its handle, with which its mean is saved.

    With several optimizers, each one's parameters look ahead once for each of its own steps. A rank that has made no
    forward for a step, for want of data, looks ahead just before it: else its weights would differ from then on.
    """

    def __init__(self, look: Look, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._look, self._parameters = look, dict(parameters)
        self._slow = {n: torch.zeros_like(p, dtype=working_dtype(p.dtype)) for n, p in parameters.items()}
        self._begun = {n: p.detach().clone() for n, p in parameters.items()}  # before their last look
        self._names, self._due = {id(p): n for n, p in parameters.items()}, set(parameters)
        self._forward = BeforeForward(model, lambda: self._ahead(self._parameters))
        begins, ended = weakref.WeakMethod(self._step_begins), weakref.WeakMethod(self._stepped)
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: _told(begins, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: _told(ended, optimizer)),
        ]

    def _own(self, optimizer: torch.optim.Optimizer) -> list[str]:
        names = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return [n for n in names if n is not None]

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._due:  # not after a forward
            self._ahead(self._own(optimizer))

    @torch.no_grad()
    def _ahead(self, candidates: Iterable[str]) -> None:
        names = [n for n in candidates if n in self._due and self._parameters[n].requires_grad]
        if names:
            weights = [self._parameters[n].detach() for n in names]
            torch._foreach_copy_([self._begun[n] for n in names], weights)
            self._look.ahead(weights, [self._slow[n] for n in names])
            self._due.difference_update(names)

    @torch.no_grad()
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        names = [n for n in self._own(optimizer) if n not in self._due]  # a step inside another one has taken the rest
        if names:
            change = [(self._parameters[n].detach() - self._begun[n]).to(self._slow[n].dtype) for n in names]
            self._look.follow([self._slow[n] for n in names], change, 1)
            self._due.update(names)
            self._forward.due = True

    def state_dict(self) -> dict[str, Any]:
        return {name: x.clone() for name, x in self._slow.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in self._slow.items():
            own.copy_(state[name]) if name in state else own.zero_()
        self._due, self._forward.due = set(self._parameters), True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._forward.close()


def _told(call: weakref.WeakMethod[Any], optimizer: torch.optim.Optimizer) -> None:
    if (found := call()) is not None:
        found(optimizer)
