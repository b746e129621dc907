"""Detect when gradients have been used, by watching every optimizer that owns some of a model's parameters.

A method with residuals holds a part of each gradient back. If the gradient is used, that part stays in the residual. If
the gradient is dropped (``zero_grad`` without a step: a GAN's pass through the other network, a skipped batch, a probe
of a line search), the part is dropped too. So what a backward leaves is pending until an optimizer steps, and dropped
if another backward comes first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.core.program import State

logger = logging.getLogger("thinwire")

_PATIENCE = 3


class StepWatch:
    """The watch of one model.

    Args:
        state: of its method.
        names: of its parameters, by ``id``.
        expected: whether an optimizer was named, so that its steps will come; if not, gradients count as used until an
            optimizer is seen.
        before, after: called with each optimizer that is about to step, and that has stepped.

    Attributes:
        fresh: whether ``.grad`` holds averages that no optimizer has used.
        dropped: how many backwards were dropped.
    """

    def __init__(
        self,
        state: State,
        names: Callable[[], Mapping[int, str]],
        *,
        expected: bool,
        before: Callable[[torch.optim.Optimizer], None] | None = None,
        after: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self._state, self.names, self._expected = state, names, expected
        self._before = None if before is None else weakref.WeakMethod(before)
        self._after = None if after is None else weakref.WeakMethod(after)
        self._seen = self._told = self.fresh = False
        self._used: set[str] = set()
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None  # whose step may call a closure
        self.dropped = 0
        self._handles = [
            register_optimizer_step_pre_hook(_weakly(self._step_begins)),
            register_optimizer_step_post_hook(_weakly(self._step_ended)),
        ]

    @property
    def hold(self) -> bool:
        """Whether what a backward leaves must wait for an optimizer's step to take effect."""
        return self._seen or self._stepping is not None or (self._expected and self.dropped < _PATIENCE)

    def begin(self) -> None:
        """Drop what is still pending, at the start of a backward whose gradients will be exchanged."""
        state = self._state
        again, self.fresh = self.fresh, False
        self._used.clear()  # left by a step that raised
        stepping = None if self._stepping is None else self._stepping()
        if state.pending and stepping is not None and _uses_all(stepping):
            names = self.names()  # whether zero_grad has been called or not
            state.commit({names[id(p)] for group in stepping.param_groups for p in group["params"] if id(p) in names})
        if state.pending:
            state.drop_pending()
            self.dropped += 1
            if self.dropped == _PATIENCE and not self._seen and stepping is None and state.rank == 0:
                logger.warning(
                    "thinwire: %d backwards, but no optimizer that owns these parameters has stepped: from now on all "
                    "gradients count as used (attach with optimizer=None if the script updates weights by itself)",
                    _PATIENCE,
                )
        if again and self._seen and not self._told and stepping is None and state.rank == 0:
            self._told = True
            logger.info(
                "thinwire: gradients were exchanged twice before optimizer.step(). If they add up, wrap all "
                "backwards but the last in `with sync.no_sync():`; if zero_grad() drops those of one, wrap that one"
            )

    def delivered(self) -> None:
        """Note that ``.grad`` holds new averages."""
        self.fresh = True

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._before is not None and (before := self._before()) is not None:
            before(optimizer)
        self._stepping = weakref.ref(optimizer) if owned(optimizer, self.names()) else None
        if self._state.pending:
            self._used |= self._with_gradient(optimizer)

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._after is not None and (after := self._after()) is not None:
            after(optimizer)
        if not owned(optimizer, self.names()):
            return
        self._seen, self.fresh, self._stepping = True, False, None
        if self._state.pending:  # a closure may have made gradients meanwhile
            self._state.commit(self._used | self._with_gradient(optimizer))
        self._used.clear()

    def _with_gradient(self, optimizer: torch.optim.Optimizer) -> set[str]:
        names = self.names()
        owned = (p for group in optimizer.param_groups for p in group["params"] if id(p) in names)
        return {names[id(p)] for p in owned if p.requires_grad and p.grad is not None}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _uses_all(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every gradient of a closure moves the parameters: LBFGS's, unless it searches along a line."""
    searches = any(group.get("line_search_fn") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.LBFGS) and not searches


def owned(optimizer: torch.optim.Optimizer, names: Container[int]) -> bool:
    """Return whether an optimizer has some of the parameters with these ids."""
    return any(id(p) in names for group in optimizer.param_groups for p in group["params"])


def _weakly(method: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Return a hook for all optimizers of the process that does not keep the model alive."""
    reference = weakref.WeakMethod(method)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (found := reference()) is not None:
            found(optimizer)

    return hook
