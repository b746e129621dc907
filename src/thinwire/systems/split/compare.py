"""Split against unsplit training, with the same data, seeds and initial weights: accuracy, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import mean
from typing import Any

from torch import nn

from thinwire.systems.split.estimate import Link, estimate, shape_of, steps_of
from thinwire.systems.split.finetune import OnStep, split_finetune, train_unsplit
from thinwire.systems.split.models import view_of
from thinwire.systems.split.plan import Recipe, SplitPlan
from thinwire.systems.split.tasks import Task
from thinwire.tools.pictures import Level, Panel, Picture, Series

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
        for name in scores:
            if on_row is not None:
                on_row(name, seed)
            if name == UNSPLIT:
                score, spent = train_unsplit(model, task, seeded, on_step)
            else:
                report = split_finetune(plans[name], model, task, recipe=seeded, on_step=on_step)
                assert report.score is not None
                score, spent = report.score, report.seconds
            scores[name].append(score)
            seconds[name].append(spent / steps)
    shape = shape_of(view_of(build(seeds[0])), task.classes)
    spent = mean(seconds[UNSPLIT])
    rows = [ComparisonRow(UNSPLIT, tuple(scores[UNSPLIT]), None, None, spent, spent)]
    for name, plan in plans.items():
        made = [estimate(step, link) for step in steps_of(plan, shape, task.train, recipe)]
        spent = mean(seconds[name])
        on_link = spent + mean(one.link_seconds for one in made)
        state, wire = mean(one.state for one in made), mean(one.wire for one in made)
        rows.append(ComparisonRow(name, tuple(scores[name]), state, wire, spent, on_link))
    return rows


_WINDOW = 20  # steps


def compare_picture(
    rows: Sequence[ComparisonRow], losses: Mapping[str, Sequence[float]], metric: str, title: str
) -> Picture:
    """Draw scores against bytes, and losses (of every step of one seed, by row) against seconds."""
    sent = tuple(
        Series(row.name, (row.wire_bytes / 1e3,), (row.score,), "points", (row.wire_bytes / 1e3, row.score))
        for row in rows
        if row.wire_bytes is not None
    )
    whole = tuple(Level(row.score, UNSPLIT) for row in rows if row.name == UNSPLIT)
    trained = []
    for row in rows:
        sums = (0.0, *accumulate(losses[row.name]))
        ends = range(min(_WINDOW, len(sums) - 1), len(sums))
        y = tuple((sums[end] - sums[max(0, end - _WINDOW)]) / min(_WINDOW, end) for end in ends if end)
        trained.append(Series(row.name, tuple(end * row.step_seconds for end in ends if end), y))
    panels = (
        Panel("kB per step through the socket", metric, sent, (), whole, log_x=True),
        Panel("seconds, the link's by the formulas", f"training loss, mean of {_WINDOW} steps", tuple(trained)),
    )
    return Picture(title, panels)
