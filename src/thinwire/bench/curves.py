"""Loss against seconds: every row trains by itself, from the same weights on the same data."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from thinwire.bench.record import Point
from thinwire.bench.round_robin import RoundRobin, RowRun, say
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.spec import BenchSpec

COMPUTE_STEPS = 4


def draw_curves(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    """Each row trains ``spec.steps`` steps; the last, where ``seconds_as``, as long as the first one took."""
    budget: float | None = None
    for index, (row, row_run) in enumerate(zip(rows, row_runs)):
        round_robin.build(spec, row, row_run)
        if row.kind == COMPUTE:
            round_robin.run(row_run, COMPUTE_STEPS, 1)
            row_run.contender = None
            continue
        last = spec.seconds_as and index == len(rows) - 1 and budget is not None
        _train(spec, row_run, round_robin, budget if last else None)
        if budget is None and row_run.record.curve:
            budget = row_run.record.curve[-1].seconds
        if row_run.contender is not None:
            row_run.contender.close()
            row_run.contender = None


def _train(spec: BenchSpec, row_run: RowRun, round_robin: RoundRobin, seconds: float | None) -> None:
    record = row_run.record
    validation = evaluate(row_run, round_robin)
    clock = 0.0
    if row_run.contender is not None:
        record.curve.append(Point(0, 0.0, float("nan") if validation is None else validation, validation))
    while row_run.contender is not None:
        done = len(record.losses)
        # Steps of the row that trains by the clock are short: judged as often, they would wait for their judge.
        if seconds is None:
            chunk = min(spec.every, spec.steps - done)
        else:  # no more than are left, as far as one can tell
            left = (seconds - clock) * done / clock if clock else 1
            chunk = max(1, min(3 * spec.every, math.ceil(left)))
        round_robin.run(row_run, chunk, 0)
        if row_run.contender is None:
            return
        clock = sum(record.step_seconds)
        recent = record.losses[-chunk:]
        record.curve.append(Point(len(record.losses), clock, sum(recent) / chunk, evaluate(row_run, round_robin)))
        say(round_robin.rank, row=record.label, clock=clock, of=seconds, steps=len(record.losses))
        if (seconds is None and len(record.losses) >= spec.steps) or (seconds is not None and clock >= seconds):
            return


def evaluate(row_run: RowRun, round_robin: RoundRobin) -> float | None:
    """Held-out loss, each rank on its own share of the held-out text."""
    if row_run.contender is None:
        return None
    contender = row_run.contender
    mine = round_robin.guarded(row_run, lambda: (contender.evaluate(round_robin.rank),))
    if mine is None or mine[0] is None:
        return None
    total = torch.tensor([mine[0]], dtype=torch.float64)
    dist.all_reduce(total, group=round_robin.control)
    return float(total) / round_robin.workers
