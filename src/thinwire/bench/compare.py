"""Time to a loss: rows train in turns, from the same weights on the same data, each until it reaches the loss."""

from __future__ import annotations

from thinwire.bench.curves import note
from thinwire.bench.round_robin import RoundRobin, RowRun
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.spec import BenchSpec


def compare(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    """Take turns of ``spec.every`` steps until each row reaches ``spec.target`` or has made ``spec.steps``.

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
