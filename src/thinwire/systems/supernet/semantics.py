"""What the optimizer does to weights that no sub-network of the step used: nothing, or a step with zero gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.systems.supernet.active import ActiveSet

SEMANTICS = ("skip", "zero")
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")


def check_semantics(semantics: str) -> None:
    """Raise ``ValueError`` unless it is "skip" or "zero"."""
    if semantics not in SEMANTICS:
        raise ValueError(
            f'semantics={semantics!r} must be "skip" (leave unused weights) or "zero" (as in the published code)'
        )


class InactiveWeights:
    """Hooks into ``optimizer.step``, until they are removed.

    * "skip": outside the active rectangles, parameters and all state tensors in a parameter's shape keep their bits.
      Adam has one step counter per tensor, so a slice's bias correction follows the count of its tensor.
    * "zero": every parameter has a gradient, so momentum and weight decay change unused weights, as in torch before 2.0
      and Horovod: for reproducing results.

    Args:
        optimizer: element-wise, of ``torch.optim``; with "skip", others can only run steps in which everything is
            active.
        net: the module with the parameters.
        current: returns the active set of the step; None: everything.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        net: nn.Module,
        current: Callable[[], ActiveSet | None],
        semantics: str = "skip",
    ) -> None:
        check_semantics(semantics)
        self._names = {id(p): name for name, p in net.named_parameters()}
        self._current, self._skip = current, semantics == "skip"
        self._saved: list[tuple[Tensor, Any, Tensor, dict[str, Tensor]]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        active = self._current()
        self._saved.clear()
        if active is None:
            return
        if self._skip and not active.is_full and not elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} does not work element by element, so unused weights cannot be left as "
                'they are: use an optimizer of torch.optim such as Adam, or semantics="zero"'
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self._names.get(id(p))
                if name is None or active.whole(name):
                    continue
                rect = active.rect(name)
                if not self._skip:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                elif rect is None:
                    p.grad = None
                elif p.grad is not None:
                    held = {key: x.clone() for key, x in optimizer.state.get(p, {}).items() if _shaped(x, p)}
                    self._saved.append((p, rect, p.detach().clone(), held))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p, rect, before, held in self._saved:
            before[rect] = p[rect]
            p.copy_(before)
            for key, x in optimizer.state.get(p, {}).items():
                if _shaped(x, p):
                    old = held.get(key)
                    if old is None:  # created by this step
                        old = torch.zeros_like(x)
                    old[rect] = x[rect]
                    x.copy_(old)
        self._saved.clear()


def _shaped(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and p.ndim > 0


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each weight's update depends only on its own gradient and state."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
