"""One rank: ``python -m thinwire.bench.worker --spec JSON --out PATH``, with torchrun's environment variables set."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.bench import wire
from thinwire.bench.compare import compare
from thinwire.bench.contenders import new_group
from thinwire.bench.curves import draw_curves
from thinwire.bench.device import place_of, prepare_rank
from thinwire.bench.models.registry import build_model
from thinwire.bench.record import RowRecord, RunRecord
from thinwire.bench.round_robin import RoundRobin, RowRun
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.session import REFUSED
from thinwire.bench.spec import BenchSpec
from thinwire.events import tell_event


def main() -> None:
    """Join the group, run every row, and let rank 0 write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    spec = BenchSpec.from_json(arguments.spec)
    backends = prepare_rank(spec.device)
    dist.init_process_group(backends, timeout=timedelta(seconds=spec.operation_seconds))
    record = run(spec)
    if dist.get_rank() == 0:
        record.write(arguments.out)
    dist.barrier()
    dist.destroy_process_group()


def run(spec: BenchSpec) -> RunRecord:
    """Run all rows of a spec on the ranks of the default group."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    # Ranks that wait for one that hangs in a row's collective must wait longer than that collective's own time-out.
    round_robin = RoundRobin(rank, workers, new_group(2 * spec.operation_seconds + 60))
    try:
        workload = build_model(spec.model, spec.seed)
    except ValueError as error:
        tell_event({REFUSED: str(error)})
        sys.exit(1)
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    shared = RunRecord(
        describe=workload.describe + place_of(spec.device, workers),
        parameters=workload.parameters,
        tensors=len(parameters),
        gradient_bytes=workload.gradient_bytes,
        workers=workers,
        interface=wire.interface(),
        rows=[],
    )
    del workload, parameters
    rows = spec.rows if any(row.kind == COMPUTE for row in spec.rows) else (Row(COMPUTE, COMPUTE), *spec.rows)
    row_runs = [RowRun(RowRecord(row.label, row.kind, row.family)) for row in rows]
    predictor = _predictor(spec) if spec.predict else None
    if spec.target is not None:
        compare(spec, rows, row_runs, round_robin)
    elif spec.curves:
        draw_curves(spec, rows, row_runs, round_robin)
    else:
        _interleave(spec, rows, row_runs, round_robin)
    if predictor is not None:
        compute = next(row_run.record for row_run in row_runs if row_run.record.kind == COMPUTE)
        for row, row_run in zip(rows, row_runs):
            row_run.record.predicted_seconds = predictor.predict(row, compute)
    shared.rows = [row_run.record for row_run in row_runs]
    return shared


def _predictor(spec: BenchSpec) -> Any:
    from thinwire.bench.predict import Predictor
    from thinwire.collectives.topology import topology_of

    return Predictor(spec, topology_of(dist.get_world_size()))


def _interleave(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    for row, row_run in zip(rows, row_runs):
        round_robin.build(spec, row, row_run)
    for number in range(spec.rounds):
        for row_run in row_runs:
            round_robin.run(row_run, spec.steps, spec.warmup if number == 0 else 1)
            if row_run.record.kind == COMPUTE and row_run.record.error:
                _stop(row_runs, row_run.record.error)  # in an exchange, each row would wait for the rank that failed
    for row_run in row_runs:
        if row_run.contender is not None:
            row_run.contender.close()


def _stop(row_runs: list[RowRun], error: str) -> None:
    """End all rows with the error of the one that exchanges nothing: the model does not train."""
    for row_run in row_runs:
        if row_run.contender is not None:
            row_run.contender.close()
            row_run.contender = None
            row_run.record.error = error


if __name__ == "__main__":
    main()
