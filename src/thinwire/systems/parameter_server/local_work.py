"""What a worker computes between two messages: a gradient, or several local steps and the resulting difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.predict.measure.profile_model import Loss
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.submit import LocalSteps, Submission

Gradient = Callable[[Tensor, int], Tensor]
"""(flat parameters, number of the batch) -> flat gradient."""


def local_gradient(
    model: nn.Module, layout: Layout, take: Callable[[int], Any], loss: Loss, theta: Tensor, number: int
) -> tuple[Tensor, float, int]:
    """Return the flat gradient ``[D]`` of batch ``number`` at ``theta`` ``[D]``, its loss and its samples."""
    batch = take(number)
    layout.write(theta, model)
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        value = loss(model, batch)
    value.backward()
    return layout.gradient(model), float(value.detach()), samples_of(batch)


def samples_of(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 1 if there is none."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.ndim), 1)


class LocalWork:
    """One worker's computation. The inner optimizer and its state stay here.

    Args:
        submit: what is handed in.
    """

    def __init__(self, submit: Submission) -> None:
        self._submit = submit
        self._x: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def submission(self, theta: Tensor, step: int, steps: int, gradient: Gradient) -> Tensor:
        """Compute submission number ``step`` at the weights ``theta`` ``[D]``, which are not modified.

        With H local steps the batches are numbered from ``step * H`` on, and the result is theta - x after ``steps``
        steps.
        """
        if not isinstance(self._submit, LocalSteps):
            return gradient(theta, step)
        if self._x is None:
            self._x = theta.clone()
            kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
            self._optimizer = kinds[self._submit.inner]([self._x], lr=self._submit.lr)
        x, optimizer = self._x, self._optimizer
        assert optimizer is not None
        x.copy_(theta)
        for i in range(steps):
            x.grad = gradient(x, step * self._submit.steps + i)
            optimizer.step()
        return theta - x
