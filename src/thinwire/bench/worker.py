"""One rank: ``python -m thinwire.bench.worker --spec JSON --out PATH``, with torchrun's environment variables set."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.bench import wire
from thinwire.bench.contenders import new_group, prepare_rank
from thinwire.bench.curves import draw_curves
from thinwire.bench.models.registry import build_model
from thinwire.bench.race import race
from thinwire.bench.record import RowRecord, RunRecord
from thinwire.bench.rows import COMPUTE, Row
from thinwire.bench.spec import BenchSpec
from thinwire.bench.turns import Track, Turns


def main() -> None:
    """Join the group, run every row, let rank 0 write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    spec = BenchSpec.from_json(arguments.spec)
    prepare_rank()
    dist.init_process_group("gloo", timeout=timedelta(seconds=spec.operation_seconds))
    record = run(spec)
    if dist.get_rank() == 0:
        record.write(arguments.out)
    dist.barrier()
    dist.destroy_process_group()


def run(spec: BenchSpec) -> RunRecord:
    """All rows of a spec on the ranks of the default group."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    # Ranks that wait for one that hangs in a row's collective wait longer than that collective's own time-out.
    turns = Turns(rank, workers, new_group(2 * spec.operation_seconds + 60))
    workload = build_model(spec.model, spec.seed)
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    shared = RunRecord(
        describe=workload.describe,
        parameters=workload.parameters,
        tensors=len(parameters),
        gradient_bytes=workload.gradient_bytes,
        workers=workers,
        interface=wire.interface(),
        rows=[],
    )
    del workload, parameters
    rows = spec.rows if any(row.kind == COMPUTE for row in spec.rows) else (Row(COMPUTE, COMPUTE), *spec.rows)
    tracks = [Track(RowRecord(row.label, row.kind, row.family)) for row in rows]
    predictor = _predictor(spec) if spec.predict else None
    if spec.target is not None:
        race(spec, rows, tracks, turns)
    elif spec.curves:
        draw_curves(spec, rows, tracks, turns)
    else:
        _interleave(spec, rows, tracks, turns)
    if predictor is not None:
        compute = next(track.record for track in tracks if track.record.kind == COMPUTE)
        for row, track in zip(rows, tracks):
            track.record.predicted_seconds = predictor.predict(row, compute)
    shared.rows = [track.record for track in tracks]
    return shared


def _predictor(spec: BenchSpec) -> Any:
    from thinwire.bench.predict import Predictor
    from thinwire.collectives.topology import topology_of

    return Predictor(spec, topology_of(dist.get_world_size()))


def _interleave(spec: BenchSpec, rows: tuple[Row, ...], tracks: list[Track], turns: Turns) -> None:
    for row, track in zip(rows, tracks):
        turns.build(spec, row, track)
    for number in range(spec.rounds):
        for track in tracks:
            turns.run(track, spec.steps, spec.warmup if number == 0 else 1)
    for track in tracks:
        if track.contender is not None:
            track.contender.close()


if __name__ == "__main__":
    main()
