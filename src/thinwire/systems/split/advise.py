"""What a plan would cost on a link, compared with the plain split: bytes by formulas, computation timed here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from thinwire.systems.split.compare import shape_of, steps_of
from thinwire.systems.split.estimate import Estimate, Link, estimate
from thinwire.systems.split.models import view_of
from thinwire.systems.split.pair import LocalPair
from thinwire.systems.split.plan import SplitPlan
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.surgery import split_model
from thinwire.systems.split.tasks import Task


def advise(
    model: nn.Module, task: Task, plan: SplitPlan, recipe: Recipe, link: Link, measured_steps: int = 5
) -> dict[str, Estimate]:
    """Return the mean step of a training with ``plan``, and with the plain cuts at the same layer.

    Args:
        model: its halves are timed; it is not changed.
        task: its data give lengths and labels.
        plan: the chosen one.
        recipe: batch size and epochs.
        link: between the machines.
        measured_steps: how many steps to run here to time the computation; the first does not count. 0: none.

    Returns:
        By name: "boundary", "ffn", and the chosen plan's.

    Raises:
        ValueError: the model cannot be cut like this.
    """
    view = view_of(model)
    plan.check(len(view.layers(model)), view.hidden)
    plain = replace(plan, init="svd", residual="drop", up=(), down=())
    rows = {"boundary": replace(plain, kind="boundary"), "ffn": replace(plain, kind="ffn"), name_of(plan): plan}
    shape = shape_of(view, task.classes)
    found = {}
    for name, row in rows.items():
        seconds = compute_seconds(model, task, row, recipe, measured_steps) if measured_steps else None
        found[name] = mean([estimate(step, link, seconds) for step in steps_of(row, shape, task.train, recipe)])
    return found


def name_of(plan: SplitPlan) -> str:
    """Return a plan's name, such as ``lowrank r=8, up int8,pack``."""
    words = [f"lowrank r={plan.rank}" if plan.kind == "lowrank" else plan.kind]
    words += [f"residual {plan.residual}"] if plan.residual != "drop" else []
    ways = (("both ways", plan.up),) if plan.up == plan.down else (("up", plan.up), ("down", plan.down))
    words += [f"{way} {','.join(chain)}" for way, chain in ways if chain]
    return ", ".join(words)


def compute_seconds(model: nn.Module, task: Task, plan: SplitPlan, recipe: Recipe, steps: int) -> float:
    """Return the seconds of a step without a link, both ends in this process, with codecs: the median of ``steps``."""
    batches = [task.train.batch(indices) for indices in recipe.batches(len(task.train), 0)[: steps + 1]]
    samples = [(b.inputs, b.lengths) for b in batches] if plan.calibrated else None
    pair = LocalPair(*split_model(model, plan, samples), recipe, recipe.steps(len(task.train)))
    spent = []
    for batch in batches:
        start = time.perf_counter()
        pair.step(batch)
        spent.append(time.perf_counter() - start)
    timed = sorted(spent[1:] or spent)
    return timed[len(timed) // 2]


def mean(steps: Sequence[Estimate]) -> Estimate:
    """Return the mean step, with bytes rounded."""
    count = len(steps)
    payload: Counter[str] = Counter()
    for step in steps:
        payload.update(step.payload)
    return replace(
        steps[0],
        bytes_up=round(sum(step.bytes_up for step in steps) / count),
        bytes_down=round(sum(step.bytes_down for step in steps) / count),
        payload={kind: round(total / count) for kind, total in payload.items()},
        link_seconds=sum(step.link_seconds for step in steps) / count,
    )
