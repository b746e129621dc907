"""Loss against seconds: every row trains by itself, or in turns to a loss; from the same weights on the same data."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
import torch.distributed as dist

from thinwire.tools.bench.record import Point
from thinwire.tools.bench.round_robin import RoundRobin, RowRun, say
from thinwire.tools.bench.rows import COMPUTE, Row
from thinwire.tools.bench.spec import BenchSpec

COMPUTE_STEPS = 4


def draw_curves(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    """Train each row ``spec.steps`` steps; with ``loss_as``, rows after the first until they reach its loss."""
    goal: Point | None = None
    for row, row_run in zip(rows, row_runs):
        round_robin.build(spec, row, row_run)
        if row.kind == COMPUTE:
            round_robin.run(row_run, COMPUTE_STEPS, 1)
            row_run.contender = None
            continue
        _train(spec, row_run, round_robin, goal)
        if spec.loss_as and goal is None and row_run.record.curve:
            goal = row_run.record.curve[-1]
        if row_run.contender is not None:
            row_run.contender.close()
            row_run.contender = None
            curve = [asdict(point) for point in row_run.record.curve]
            say(round_robin.rank, trained={"label": row.label, "kind": row.kind, "curve": curve})


def _train(spec: BenchSpec, row_run: RowRun, round_robin: RoundRobin, goal: Point | None) -> None:
    """Train as many steps as the spec says; with a goal, until two consecutive points reach it, to rule out luck."""
    record = row_run.record
    note(row_run, round_robin)
    while row_run.contender is not None:
        left = spec.steps - len(record.losses)
        round_robin.run(row_run, spec.every if goal else min(spec.every, left), 0)
        note(row_run, round_robin)
        if goal is None:
            if len(record.losses) >= spec.steps:
                return
        elif row_run.seconds >= goal.seconds or all(p.judged <= goal.judged for p in record.curve[-2:]):
            return


def note(row_run: RowRun, round_robin: RoundRobin) -> None:
    """Add one point to a row's curve, if the row still trains."""
    if row_run.contender is None or row_run.record.kind == COMPUTE:
        return
    record = row_run.record
    validation = _evaluate(row_run, round_robin)
    if row_run.contender is None:
        return
    recent = record.losses[record.curve[-1].step :] if record.curve else []
    if recent:
        loss = sum(recent) / len(recent)
    else:
        loss = math.nan if validation is None else validation
    record.curve.append(Point(len(record.losses), row_run.seconds, loss, validation))
    say(round_robin.rank, row=record.label, steps=len(record.losses), validation=validation)


def _evaluate(row_run: RowRun, round_robin: RoundRobin) -> float | None:
    """Return the held-out loss, with each rank on its own share of the held-out text."""
    if row_run.contender is None:
        return None
    contender = row_run.contender
    mine = round_robin.guarded(row_run, lambda: (contender.evaluate(round_robin.rank),))
    if mine is None or mine[0] is None:
        return None
    total = torch.tensor([mine[0]], dtype=torch.float64)
    dist.all_reduce(total, group=round_robin.control)
    return float(total) / round_robin.workers


def compare(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    """Train in turns of ``spec.every`` steps until each row reaches ``spec.target`` or has made ``spec.steps``.

    A row's seconds cover all of its training, including the first steps and those in which a plan is measured, but not
    building and evaluating it. The row without exchange takes ``spec.rounds`` turns: it is only there to be timed.
    """
    for row, row_run in zip(rows, row_runs):
        round_robin.build(spec, row, row_run)
        note(row_run, round_robin)
    running = [row_run for row_run in row_runs if row_run.contender is not None]
    while running:
        for row_run in running:
            round_robin.run(row_run, min(spec.every, spec.steps - len(row_run.record.losses)), 0)
            note(row_run, round_robin)
        running = [row_run for row_run in running if not _done(spec, row_run)]
    for row_run in row_runs:
        if row_run.contender is not None:
            row_run.contender.close()


def _done(spec: BenchSpec, row_run: RowRun) -> bool:
    if row_run.contender is None:
        return True
    record = row_run.record
    if record.kind == COMPUTE:
        return len(record.losses) >= min(spec.steps, spec.rounds * spec.every)
    assert spec.target is not None
    return record.curve[-1].judged <= spec.target or len(record.losses) >= spec.steps
