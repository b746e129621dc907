"""Train a model across the cut, in one process or as either end; and the same model without a cut, to compare."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.checks import local_path
from thinwire.core.tls import Credentials
from thinwire.systems.split.connection import CloudClient, CloudServer
from thinwire.systems.split.ends import CloudEnd, EdgeEnd, LocalPair
from thinwire.systems.split.estimate import Link, estimate, shape_of, steps_of
from thinwire.systems.split.frames import ByteLedger
from thinwire.systems.split.models import View, inputs_of, view_of
from thinwire.systems.split.plan import Recipe, SplitPlan
from thinwire.systems.split.programs import dropout_of
from thinwire.systems.split.surgery import Sample, load_half, split_model
from thinwire.systems.split.tasks import Batch, Task, TextData
from thinwire.tools.pictures import Panel, Picture, Series

OnStep = Callable[[int, int, float], None]
"""Called with the number of steps done, the number of all steps, and the loss."""


@dataclass(frozen=True)
class SplitReport:
    """The result of a training.

    Attributes:
        steps: of this call.
        losses: one per step; empty at the cloud.
        score: the task's metric on the held-out samples; None at the cloud.
        baseline_score: of the unsplit model, trained on the same samples in the same order; None unless requested.
        seconds: of this call's steps, without evaluation.
        training: bytes of the steps by kind, as counted at this end.
        evaluation: bytes of the evaluation.
        tokens: real tokens trained on.
        half: what was trained here: the front, the back, or both.
    """

    steps: int
    losses: list[float]
    score: float | None
    baseline_score: float | None
    seconds: float
    training: ByteLedger
    evaluation: ByteLedger
    tokens: int
    half: tuple[nn.Module, ...] = field(repr=False, default=())

    def to_data(self) -> dict[str, Any]:
        kept = {"training": self.training.to_data(), "evaluation": self.evaluation.to_data()}
        names = ("steps", "losses", "score", "baseline_score", "seconds", "tokens")
        return {name: getattr(self, name) for name in names} | kept


def split_finetune(
    plan: SplitPlan | None,
    halves: nn.Module | str | Path,
    task: Task | None = None,
    *,
    role: str = "local",
    recipe: Recipe | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
    tls: Credentials | None = None,
    insecure: bool = False,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 100,
    baseline: bool = False,
    samples: int = 4,
    name: str = "edge",
    reconnect_seconds: float = 30.0,
    receive_seconds: float = 60.0,
    edges: int = 1,
    on_step: OnStep | None = None,
    say: Callable[[str], None] | None = None,
) -> SplitReport:
    """Fine-tune a model across the cut.

    Args:
        plan: for role "local"; for the other roles it is in the files.
        halves: a model of transformers (role "local"), or a file of ``prepare`` or its directory.
        task: the edge's data; the cloud has none.
        role: "local" (both ends in this process), "edge" or "cloud".
        recipe: the same at both ends.
        address, tls, insecure: as for :class:`~thinwire.split.CloudClient` and ``CloudServer``.
        checkpoint_dir: of this end; an interrupted training continues from the newest step that both ends have.
        checkpoint_every: in steps.
        baseline: role "local": also train the unsplit model.
        samples: role "local": batches for plans that need sample activations.
        name: role "edge": by which the cloud tells edges apart if there are no certificates.
        reconnect_seconds: role "edge": how long to try to reach a lost cloud again.
        receive_seconds: role "edge": how long a reply may take.
        edges: role "cloud": how many edges to serve, one after the other.
        on_step: called for progress.
        say: role "cloud": called with a sentence when edges come, go or are refused.

    Raises:
        ValueError: the arguments do not match.
        SplitError: the other end is lost, or does not match.
    """
    recipe = recipe or Recipe()
    directory = None if checkpoint_dir is None else local_path(checkpoint_dir)
    every = checkpoint_every if directory else 0
    if role == "local":
        if plan is None or not isinstance(halves, nn.Module) or task is None:
            raise ValueError("role='local' needs a plan, a transformers model and a task")
        check_task(view_of(halves), task)
        front, back = split_model(halves, plan, sample_inputs(plan, task, recipe, samples))
        pair = LocalPair(front, back, recipe, recipe.steps(len(task.train)), directory, f"local {plan.hash}")
        report = train(pair, task, pair.ledger, every, on_step)
        return replace(report, baseline_score=train_unsplit(halves, task, recipe)[0]) if baseline else report
    if isinstance(halves, nn.Module):
        raise ValueError(f"role={role!r} takes a file that split.prepare wrote, not a model")
    half = load_half(halves, role if role in ("edge", "cloud") else "edge")
    if role == "edge" and task is not None:
        check_task(half.module.view, task)
        edge = EdgeEnd(half.module, half.pair, recipe, recipe.steps(len(task.train)), name, directory)
        with CloudClient(*address, tls, insecure, receive_seconds, reconnect_seconds) as link:
            link.attach(edge)
            report = train(edge, task, link.ledger, every, on_step)
            edge.bye()
        return report
    if role == "cloud" and task is None:
        cloud = CloudEnd(half.module, half.pair, recipe, directory)
        server = CloudServer(cloud, *address, credentials=tls, insecure=insecure, say=say or (lambda words: None))
        return serve(server, edges, on_step)
    raise ValueError(f"role={role!r}: use local, edge (with a task) or cloud (without one)")


def sample_inputs(plan: SplitPlan, task: Task, recipe: Recipe, count: int) -> list[Sample] | None:
    if not plan.calibrated:
        return None
    batches = [task.train.batch(indices) for indices in recipe.batches(len(task.train), 0)[:count]]
    return [(batch.inputs, batch.lengths) for batch in batches]


def train(edge: EdgeEnd, task: Task, ledger: ByteLedger, checkpoint_every: int, on_step: OnStep | None) -> SplitReport:
    """Run the edge's loop: all steps from where both ends are, then the held-out samples."""
    losses: list[float] = []
    tokens, begun, start = 0, edge.steps, time.perf_counter()
    before = copy.deepcopy(ledger)
    for indices in remaining(edge.recipe, len(task.train), edge.steps):
        batch = task.train.batch(indices)
        losses.append(float(edge.step(batch)))
        tokens += int(batch.lengths.sum()) if batch.lengths is not None else 0
        if on_step is not None:
            on_step(edge.steps, edge.total, losses[-1])
        if checkpoint_every and edge.steps % checkpoint_every == 0:
            edge.checkpoint()
    seconds = time.perf_counter() - start
    trained = copy.deepcopy(ledger)
    score = task.score(evaluate(edge, task.held_out, edge.recipe.batch_size))
    bytes_of = trained.since(before), ledger.since(trained)
    halves = (edge.front, edge.back) if isinstance(edge, LocalPair) else (edge.half,)
    return SplitReport(edge.steps - begun, losses, score, None, seconds, *bytes_of, tokens, halves)


def remaining(recipe: Recipe, samples: int, steps: int) -> list[list[int]]:
    per_epoch = -(-samples // recipe.batch_size)
    return [b for e in range(steps // per_epoch, recipe.epochs) for b in recipe.batches(samples, e)][
        steps % per_epoch :
    ]


def check_task(view: View, task: Task) -> None:
    longest = max(map(len, (*task.train.tokens, *task.held_out.tokens)))
    places = int(view.config.max_position_embeddings) - (2 if view.model_type == "roberta" else 0)
    for what, needed, there in (
        ("token ids", task.vocabulary, int(view.config.vocab_size)),
        ("tokens in a sample", longest, places),
        ("classes", task.classes, int(view.config.num_labels)),
    ):
        if needed > there:
            raise ValueError(
                f"task {task.name} has {needed} {what}, the model accepts {there}: cut a model for this task"
            )


def evaluate(edge: EdgeEnd, data: TextData, batch_size: int) -> Tensor:
    return torch.cat([edge.evaluate(batch) for batch in _batches(data, batch_size)])


def serve(server: CloudServer, edges: int | None, on_step: OnStep | None = None) -> SplitReport:
    done = 0

    def trained(edge: str, steps: int) -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(steps, 0, float("nan"))

    server.cloud.trained = trained
    start = time.perf_counter()
    with server:
        server.serve(edges)
    seconds = time.perf_counter() - start
    return SplitReport(done, [], None, None, seconds, server.ledger, ByteLedger(), 0, (server.cloud.half,))


def train_unsplit(model: nn.Module, task: Task, recipe: Recipe, on_step: OnStep | None = None) -> tuple[float, float]:
    """Train a copy with the model's own ``forward``, on the same samples in order: held-out score, training seconds."""
    model = copy.deepcopy(model)
    optimizer, total, step = recipe.optimizer(model), recipe.steps(len(task.train)), 0
    start = time.perf_counter()
    model.train()
    for epoch in range(recipe.epochs):
        for indices in recipe.batches(len(task.train), epoch):
            batch = task.train.batch(indices)
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
    model.eval()
    with torch.no_grad():
        logits = [whole_forward(model, batch) for batch in _batches(task.held_out, recipe.batch_size)]
    return task.score(torch.cat(logits)), seconds


def whole_forward(model: nn.Module, batch: Batch) -> Tensor:
    extra = {}
    if batch.lengths is not None:
        length = next(iter(batch.inputs.values())).shape[1]
        extra["attention_mask"] = (torch.arange(length) < batch.lengths[:, None]).long()
    logits: Tensor = model(**inputs_of(batch.inputs, *view_of(model).inputs), **extra).logits
    return logits


def _batches(data: TextData, batch_size: int) -> Iterator[Batch]:
    order = range(len(data))
    return (data.batch(order[i : i + batch_size]) for i in range(0, len(data), batch_size))


UNSPLIT = "unsplit"


@dataclass(frozen=True)
class ComparisonRow:
    name: str
    scores: tuple[float, ...]  # the task's metric, one per seed
    state_bytes: float | None  # mean of activations and gradients per step; None: unsplit
    wire_bytes: float | None  # mean through the socket per step, including TLS; None: unsplit
    compute_seconds: float  # per step, measured here, both ends in one process, without a link
    step_seconds: float  # per step: measured computation, and the link's time by formulas

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
    sent = [(row, row.wire_bytes / 1e3) for row in rows if row.wire_bytes is not None]
    scores = [Series(row.name, (size,), (row.score,), "points", (size, row.score)) for row, size in sent]
    across = min(size for _, size in sent), max(size for _, size in sent)
    scores += [Series(row.name, across, (row.score, row.score)) for row in rows if row.name == UNSPLIT]
    trained = []
    for row in rows:
        sums = (0.0, *accumulate(losses[row.name]))
        ends = range(min(_WINDOW, len(sums) - 1), len(sums))
        y = tuple((sums[end] - sums[max(0, end - _WINDOW)]) / min(_WINDOW, end) for end in ends if end)
        trained.append(Series(row.name, tuple(end * row.step_seconds for end in ends if end), y))
    panels = (
        Panel("kilobytes sent per step", metric, tuple(scores), log_x=True),
        Panel("seconds: computing measured, link predicted", f"training loss, mean of {_WINDOW} steps", tuple(trained)),
    )
    return Picture(title, panels)
