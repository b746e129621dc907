"""All code that looks into a ``GradScaler``: the loss scale of a step, and whether gradients still contain it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.core.program import State

logger = logging.getLogger("thinwire")

warned = False


def loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return the scale in this step's gradients, a 0-dim fp32 tensor, without waiting for it; None: there is none."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor = scaler.scale(torch.ones((), dtype=torch.float32, device=device)).detach()
    return scale


def unscale_state(scaler: Any, state: State, device: torch.device) -> None:
    """Divide by a scaler's scale the residuals that were kept with it, before the scaler was found."""
    if (scale := loss_scale(scaler, device)) is not None:
        state.rescale(1.0 / float(scale))
    logger.info("thinwire: found the GradScaler of this optimizer; residuals are kept without its scale")


def still_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler has scaled a loss, and not unscaled this optimizer's gradients; False if unknown."""
    global warned
    if scaler is None or not scaler.is_enabled():
        return False
    try:
        if scaler._scale is None:  # made by the first scaled loss
            return False
        # Ask without inserting: the record is a defaultdict, and an entry made here would mislead the scaler.
        stage = scaler._per_optimizer_states.get(id(optimizer), {"stage": None})["stage"]
        return stage is None or str(stage.name) == "READY"
    except (AttributeError, KeyError, TypeError):
        if not warned:
            warned = True
            logger.warning(
                "thinwire: this torch's GradScaler keeps its stages differently, so step() on scaled gradients goes "
                "unnoticed; call scaler.step(optimizer)"
            )
        return False


def refuse_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    if still_scaled(scaler, optimizer) and any(
        p.grad is not None for group in optimizer.param_groups for p in group["params"]
    ):
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step() on gradients that still carry the loss scale would use norms that are off by that factor: "
            "call scaler.step(optimizer), or scaler.unscale_(optimizer) first"
        )


class SkippedSteps:
    """Calls a bound method when a ``GradScaler.step`` has skipped a step; it is wrapped, as torch has no hook."""

    _listeners: ClassVar[list[weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]]] = []
    _original: ClassVar[Any] = None

    def __init__(self, listener: Callable[[torch.optim.Optimizer], None]) -> None:
        cls, self._mine = SkippedSteps, weakref.WeakMethod(listener, SkippedSteps._forget)
        cls._listeners.append(self._mine)
        if cls._original is None:
            cls._original = original = torch.amp.GradScaler.step

            @functools.wraps(original)
            def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                made: list[bool] = []
                hook = register_optimizer_step_post_hook(lambda *_: made.append(True))  # a wrapper's inner one's, too
                try:
                    result = original(scaler, optimizer, *args, **kwargs)
                finally:
                    hook.remove()
                for reference in [] if made else list(cls._listeners):
                    if (found := reference()) is not None:
                        found(optimizer)
                return result

            torch.amp.GradScaler.step = step  # type: ignore[assignment]

    def remove(self) -> None:
        SkippedSteps._forget(self._mine)

    @staticmethod
    def _forget(listener: Any) -> None:
        """Also where its owner has gone without a word."""
        cls = SkippedSteps
        cls._listeners[:] = [x for x in cls._listeners if x is not listener]
        if not cls._listeners and cls._original is not None:
            torch.amp.GradScaler.step = cls._original  # type: ignore[method-assign]
            cls._original = None
