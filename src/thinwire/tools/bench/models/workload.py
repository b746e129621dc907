"""A workload: a model, the loss of one rank's batch at one step, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, int, int], Tensor]


def beside(model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors on the device of the model's parameters."""
    device = next(model.parameters()).device
    return tuple(x.to(device) for x in tensors)


def draws(step: int, rank: int, *, held_out: bool = False) -> torch.Generator:
    """Return the generator of a rank's batch at a step; that of held-out data gives no training data."""
    return torch.Generator().manual_seed(step * 1_000_003 + rank * 7919 + (1 << 40) * held_out)


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        name: the model's name as the user wrote it.
        model: the module, freshly initialised.
        loss: ``loss(model, step, rank)``: the loss of that rank's batch; the same arguments give the same batch. The
            model passed in may be a wrapper (DDP), so only calling it is allowed.
        optimizer: creates the optimizer of a module, or a list of several.
        describe: one-line description.
        evaluate: ``evaluate(model, 0, rank)``: loss on held-out data of that rank, or None. The model is in evaluation
            mode then, and no gradients are kept.
        find_unused_parameters: as DDP takes it, for models in which some parameters get no gradient in some steps.
    """

    name: str
    model: nn.Module
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer | list[Optimizer]]
    describe: str
    evaluate: Loss | None = None
    find_unused_parameters: bool = False

    @property
    def parameters(self) -> int:
        """Number of trained parameters (shared ones once)."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def held_out_loss(self, rank: int = 0) -> float | None:
        """Return the loss on a rank's held-out data, None without such data; the model and its modes do not change."""
        if self.evaluate is None:
            return None
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                return float(self.evaluate(self.model, 0, rank))
        finally:
            for module, training in modes.items():
                module.training = training  # not train(), which would change its children too
