"""The baseline: the whole model in one process, on the same samples in the same order, with the same recipe."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from thinwire.systems.split.batch import Batch
from thinwire.systems.split.models import view_of
from thinwire.systems.split.models.base import inputs_of
from thinwire.systems.split.programs import dropout_of
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.tasks import Task


def train_unsplit(
    model: nn.Module, task: Task, recipe: Recipe, on_step: Callable[[int, int, float], None] | None = None
) -> tuple[float, float]:
    """Train a copy with the model's own ``forward``. Return the held-out score and the seconds of training."""
    model = copy.deepcopy(model)
    optimizer, total, step = recipe.optimizer(model), recipe.steps(len(task.train)), 0
    start = time.perf_counter()
    for epoch in range(recipe.epochs):
        for indices in recipe.batches(len(task.train), epoch):
            batch = task.train.batch(indices)
            model.train()
            recipe.set_rate(optimizer, step, total)
            with dropout_of(recipe, "unsplit", step):
                loss = recipe.loss_function(whole_forward(model, batch), batch.labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if on_step is not None:
                on_step(step, total, float(loss.detach()))
    seconds = time.perf_counter() - start
    return task.score(_logits(model, task, recipe.batch_size)), seconds


def whole_forward(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of the unsplit model."""
    extra = {}
    if batch.lengths is not None:
        length = next(iter(batch.inputs.values())).shape[1]
        extra["attention_mask"] = (torch.arange(length) < batch.lengths[:, None]).long()
    logits: Tensor = model(**inputs_of(batch.inputs, *view_of(model).inputs), **extra).logits
    return logits


def _logits(model: nn.Module, task: Task, batch_size: int) -> Tensor:
    model.eval()
    order: Sequence[int] = range(len(task.held_out))
    with torch.no_grad():
        return torch.cat(
            [
                whole_forward(model, task.held_out.batch(order[i : i + batch_size]))
                for i in range(0, len(order), batch_size)
            ]
        )
