"""The planner's prediction: each row's step time from the measured network and the measured model."""

from __future__ import annotations

import statistics
from itertools import count

import torch.distributed as dist

from thinwire.bench.device import rank_device
from thinwire.bench.models.registry import build_model
from thinwire.bench.record import RowRecord
from thinwire.bench.rows import Row
from thinwire.bench.spec import BenchSpec
from thinwire.planner.costs import Costs
from thinwire.planner.profiles import ModelProfile
from thinwire.program import Topology

PROBE_SECONDS = 8.0


class Predictor:
    """Measures once, on all ranks at the same time, before the rows run.

    Args:
        spec: spec of the run.
        topology: topology of its ranks.
    """

    def __init__(self, spec: BenchSpec, topology: Topology) -> None:
        from thinwire.measure import probe, profile_model

        self._spec, self._topology = spec, topology
        self._device = rank_device(spec.device)
        workload = build_model(spec.model, spec.seed, self._device)
        self._model = workload.model
        rank = dist.get_rank()
        dist.barrier()
        self.profile: ModelProfile = profile_model(
            workload.model, count(), lambda model, step: workload.loss(model, step, rank), steps=10, warmup=3
        )
        largest = min(16 << 20, max(1 << 16, workload.gradient_bytes))
        scopes = 3 if topology.two_levels else 1  # number of groups to measure
        self.costs: Costs = probe(
            None, topology, largest_bytes=largest, seconds=PROBE_SECONDS * scopes, kernel_seconds=2.0
        ).costs

    def predict(self, row: Row, compute: RowRecord) -> float | None:
        """Return the seconds of a thinwire row's step; ``compute`` is the row without exchange."""
        from thinwire.engine.controller.planning import price_plan
        from thinwire.engine.parameters import managed_parameters
        from thinwire.measure.cores import spare_cores
        from thinwire.methods.registry import METHODS
        from thinwire.methods.registry import method as named
        from thinwire.planner.measured import Measured

        if row.kind not in METHODS or not compute.step_seconds:
            return None
        method = named(row.kind, **row.options)
        on_card = self._device.type == "cuda"
        side_stream = on_card or spare_cores(self._topology.world_size)  # the bench's nodes are all this machine
        measured = Measured(self.profile, self.costs, self._topology, side_stream)
        alone = statistics.median(compute.step_seconds)
        passes = self.profile.forward_seconds + sum(self.profile.backward_seconds)
        rest = max(0.0, alone - passes)  # rest of a step without exchange: optimizer and data
        managed = managed_parameters(self._model, method, "auto")
        backend = "nccl" if on_card else "gloo"
        return price_plan(method, managed, backend, measured, None, rest).step_seconds
