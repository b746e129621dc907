"""Split against unsplit training, with the same data, seeds and initial weights: accuracy, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from torch import nn

from thinwire.systems.split.estimate import Crossing, Link, Shape, crossings, estimate
from thinwire.systems.split.finetune import OnStep, split_finetune
from thinwire.systems.split.models import View, view_of
from thinwire.systems.split.plan import SplitPlan
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.tasks import Task, TextData
from thinwire.systems.split.unsplit import train_unsplit

UNSPLIT = "unsplit"


@dataclass(frozen=True)
class ComparisonRow:
    """The results of one way of training.

    Attributes:
        name: "unsplit", or the plan's name.
        scores: the task's metric, one per seed.
        state_bytes: mean bytes of activations and gradients per step; None for the unsplit model.
        wire_bytes: mean bytes through the socket per step, including TLS; None for the unsplit model.
        compute_seconds: per step, measured here, both ends in one process, without a link.
        step_seconds: per step on the link: measured computation plus the link's time by formulas.
    """

    name: str
    scores: tuple[float, ...]
    state_bytes: float | None
    wire_bytes: float | None
    compute_seconds: float
    step_seconds: float

    @property
    def score(self) -> float:
        """Mean over the seeds."""
        return mean(self.scores)

    def to_data(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score}


def compare(
    build: Callable[[int], nn.Module],
    task: Task,
    plans: dict[str, SplitPlan],
    recipe: Recipe,
    link: Link,
    seeds: Sequence[int] = (0,),
    on_step: OnStep | None = None,
    on_row: Callable[[str, int], None] | None = None,
) -> list[ComparisonRow]:
    """Train the unsplit model, and one split model per plan, on each seed.

    Args:
        build: seed -> model with its initial weights.
        task: the data, the same for all.
        plans: by name.
        recipe: its seed is replaced.
        link: for the seconds.
        seeds: for weights, order and dropout.
        on_step: called for progress within a row.
        on_row: called with the row's name and the seed when a training begins.

    Returns:
        The unsplit row, and one per plan.
    """
    scores: dict[str, list[float]] = {name: [] for name in (UNSPLIT, *plans)}
    seconds: dict[str, list[float]] = {name: [] for name in (UNSPLIT, *plans)}
    steps = recipe.steps(len(task.train))
    for seed in seeds:
        model, seeded = build(seed), replace(recipe, seed=seed)
        if on_row is not None:
            on_row(UNSPLIT, seed)
        score, spent = train_unsplit(model, task, seeded, on_step)
        scores[UNSPLIT].append(score)
        seconds[UNSPLIT].append(spent / steps)
        for name, plan in plans.items():
            if on_row is not None:
                on_row(name, seed)
            report = split_finetune(plan, model, task, recipe=seeded, on_step=on_step)
            assert report.score is not None
            scores[name].append(report.score)
            seconds[name].append(report.seconds / steps)
    view = view_of(build(seeds[0]))
    rows = [ComparisonRow(UNSPLIT, tuple(scores[UNSPLIT]), None, None, mean(seconds[UNSPLIT]), mean(seconds[UNSPLIT]))]
    for name, plan in plans.items():
        made = [estimate(step, link) for step in steps_of(plan, shape_of(view, task.classes), task.train, recipe)]
        spent = mean(seconds[name])
        on_link = spent + mean(one.link_seconds for one in made)
        state, wire = mean(one.state for one in made), mean(one.wire for one in made)
        rows.append(ComparisonRow(name, tuple(scores[name]), state, wire, spent, on_link))
    return rows


def shape_of(view: View, classes: int) -> Shape:
    """Return the properties of a model that determine the bytes."""
    types = "token_type_ids" in view.inputs
    return Shape(view.hidden, view.intermediate, classes, view.uses_lengths, types=types, pixels=view.pixels)


def steps_of(plan: SplitPlan, shape: Shape, data: TextData, recipe: Recipe) -> list[list[Crossing]]:
    """Return the messages of every step of a training."""
    shape = replace(shape, types=shape.types and data.types is not None)
    made = []
    for epoch in range(recipe.epochs):
        for indices in recipe.batches(len(data), epoch):
            lengths = [len(data.tokens[i]) for i in indices]
            fresh = sum(lengths) if epoch == 0 else 0
            made.append(crossings(plan, shape, lengths, len(indices), max(lengths), fresh_tokens=fresh))
    return made
