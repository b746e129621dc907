"""One rank: ``python -m thinwire.tools.bench.worker SETTINGS PATH``, with torchrun's variables set."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch.distributed as dist

from thinwire.core.collectives.groups import topology_of
from thinwire.core.durable import write_whole
from thinwire.core.events import tell_event
from thinwire.core.program import Topology
from thinwire.tools.bench.device import place_of, prepare_rank, rank_device
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.round_robin import RoundRobin, RowRun, compare, draw_curves
from thinwire.tools.bench.row_on_rank import new_group
from thinwire.tools.bench.rows import COMPUTE, Row
from thinwire.tools.bench.session import REFUSED, BenchSpec, RowRecord, RunRecord

PROBE_SECONDS = 8.0


def main(settings: str, out: str) -> None:
    spec = BenchSpec.from_json(settings)
    backends = prepare_rank(spec.device)
    dist.init_process_group(backends, timeout=timedelta(seconds=spec.operation_seconds))
    record = run(spec)
    if dist.get_rank() == 0:
        write_whole(Path(out), record.to_json(), synced=False)
    dist.barrier()
    dist.destroy_process_group()


def run(spec: BenchSpec) -> RunRecord:
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
        interface=round_robin.interface,
        rows=[],
    )
    del workload, parameters
    rows = spec.rows if any(row.kind == COMPUTE for row in spec.rows) else (Row(COMPUTE, COMPUTE), *spec.rows)
    row_runs = [RowRun(RowRecord(row.label, row.kind, row.family)) for row in rows]
    predict = _predictor(spec, topology_of(workers)) if spec.predict else None
    if spec.target is not None:
        compare(spec, rows, row_runs, round_robin)
    elif spec.curves:
        draw_curves(spec, rows, row_runs, round_robin)
    else:
        _interleave(spec, rows, row_runs, round_robin)
    if predict is not None:
        compute = next(row_run.record for row_run in row_runs if row_run.record.kind == COMPUTE)
        for row, row_run in zip(rows, row_runs):
            row_run.record.predicted_seconds = predict(row, compute)
    shared.rows = [row_run.record for row_run in row_runs]
    return shared


def _interleave(spec: BenchSpec, rows: tuple[Row, ...], row_runs: list[RowRun], round_robin: RoundRobin) -> None:
    for row, row_run in zip(rows, row_runs):
        round_robin.build(spec, row, row_run)
    for number in range(spec.rounds):
        for row_run in row_runs:
            round_robin.run(row_run, spec.steps, spec.warmup if number == 0 else 1)
            if row_run.record.kind == COMPUTE and (error := row_run.record.error):
                for other in filter(lambda one: one.contender, row_runs):  # each would wait for the rank that failed
                    other.fail(error)
    for row_run in row_runs:
        if row_run.contender is not None:
            row_run.contender.close()


def _predictor(spec: BenchSpec, topology: Topology) -> Callable[[Row, RowRecord], float | None]:
    """Measure once, on all ranks at the same time. Return (row, the row without exchange) -> predicted step seconds."""
    from thinwire.core.methods.registry import METHODS
    from thinwire.core.methods.registry import method as named
    from thinwire.core.pricing.plans import Measured
    from thinwire.engine.controller.planning import price_plan
    from thinwire.engine.parameters import managed_parameters
    from thinwire.predict.measure import probe, profile_model
    from thinwire.predict.measure.machine import spare_cores

    rank, device = dist.get_rank(), rank_device(spec.device)
    workload = build_model(spec.model, spec.seed, device)
    model, largest = workload.model, min(16 << 20, max(1 << 16, workload.gradient_bytes))
    dist.barrier()
    profile = profile_model(model, count(), lambda model, step: workload.loss(model, step, rank), steps=10, warmup=3)
    seconds = PROBE_SECONDS * (3 if topology.two_levels else 1)  # number of groups to measure
    costs = probe(None, topology, largest_bytes=largest, seconds=seconds, kernel_seconds=2.0).costs
    on_card = device.type == "cuda"
    side_stream = on_card or spare_cores(topology.world_size)  # the bench's nodes are all this machine
    measured = Measured(profile, costs, topology, side_stream)
    passes = profile.forward_seconds + sum(profile.backward_seconds)

    def predict(row: Row, compute: RowRecord) -> float | None:
        if row.kind not in METHODS or not compute.step_seconds:
            return None
        method = named(row.kind, **row.of_method)
        managed = managed_parameters(model, method, "auto")
        rest = max(0.0, statistics.median(compute.step_seconds) - passes)  # without exchange: optimizer and data
        return price_plan(method, managed, "nccl" if on_card else "gloo", measured, None, rest).step_seconds

    return predict


if __name__ == "__main__":
    main(*sys.argv[1:])
