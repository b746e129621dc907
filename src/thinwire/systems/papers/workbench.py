"""What papers are reproduced with: the simulator at their scale, and the lab at ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.predict.choose import resolved
from thinwire.predict.timeline import Timeline, simulate
from thinwire.tools import lab
from thinwire.tools.bench.race_losses import TrainingSetup, Trajectory, steps_factors, trajectories
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec, RowRecord, run_session
from thinwire.tools.bench.summary import BenchResult, summarise
from thinwire.tools.cli.plan_inputs import read_question

Told = Callable[[str], None]


@dataclass(frozen=True)
class Workbench:
    """Runs of this machine. ``full``: longer, and with more seeds; ``tell`` is called with what is being measured."""

    full: bool = False
    tell: Told = lambda text: None

    def bench(
        self, model: str, methods: str, *, workers: int = 2, ranks_per_node: int = 1, link: str | None = None,
        steps: int = 8, rounds: int = 3, warmup: int = 3,
    ) -> BenchResult:  # fmt: skip
        """Return steps of the rows of ``methods``, in turns on an emulated link, as ``thinwire bench`` does."""
        bits = lab.parse_rate(link) if link else None
        spec = BenchSpec(model, parse_rows(methods), workers, link, bits, steps, rounds, warmup,
                         ranks_per_node=ranks_per_node)  # fmt: skip
        cluster = lab.Cluster.parse(workers, ranks_per_node, link, None)
        self.tell(f"{model}, {workers} workers, {link or 'no limit'}: {methods}")
        record, launched = run_session(spec, functools.partial(lab.run, cluster), self._follow)
        result = summarise(spec, record, emulated=launched.emulated, note=launched.note)
        if failed := [f"{row.label}: {row.error}" for row in result.rows if row.error]:
            raise RuntimeError("; ".join(failed))
        return result

    def train(
        self, model: str, methods: str, *, workers: int = 2, steps: int = 240, every: int = 8, seed: int = 0,
        rate: float = 1.0,
    ) -> dict[str, RowRecord]:  # fmt: skip
        """Return whole trainings, by label, on ranks that nothing slows down; ``rate`` multiplies the learning rate."""
        spec = BenchSpec(model, parse_rows(methods), workers, steps=steps, every=every, warmup=0, seed=seed,
                         curves=True, rate_factor=rate)  # fmt: skip
        self.tell(f"{model}, {workers} workers, {steps} steps, seed {seed}: {methods}")
        record, _ = run_session(spec, functools.partial(lab.run, lab.Cluster(workers)), self._follow)
        return {row.label: row for row in record.rows}

    def steps_to_loss(
        self, model: str, methods: str, *, workers: int = 2, steps: int = 240, rates: Sequence[float] = (1.0, 2.0),
    ) -> dict[str, float]:  # fmt: skip
        """Return how many steps each row needs for one of DDP's, to DDP's loss after 60 % of its run; inf: never.

        Each row, DDP too, takes the best of the factors on its learning rate, on seed 0; other seeds are compared.
        """
        setup = TrainingSetup(model, workers, steps, max(1, steps // 30), None)
        rows = {row.label: row for row in parse_rows(f"ddp,{methods}")}

        def run(labels: Sequence[str], rate: float, seed: int) -> dict[str, Trajectory]:
            self.tell(f"{model}, {workers} workers, {steps} steps at {rate:g} x the rate, seed {seed}")
            launch = functools.partial(lab.run, lab.Cluster(workers))
            return trajectories(setup, [rows[label] for label in labels], rate, seed, launch, on_progress=self._follow)

        seeds = (1, 2, 3) if self.full else (1,)
        found = steps_factors(run, list(rows), "ddp", 0.6, reach=2 * setup.every, rates=rates, seeds=seeds)
        base = found["ddp"].median or math.inf
        return {label: (one.median or math.inf) / base for label, one in found.items() if label != "ddp"}

    def _follow(self, event: Mapping[str, Any]) -> None:
        if "step" in event:
            self.tell(f"{event['row']}: step {event['step']}, loss {event['loss']:.3f}")


def predicted(
    model: str, methods: str, *, workers: int, link: str, ranks_per_node: int = 1, batch: int | None = None,
    device: str | None = None, flops: float | None = None, latency: str | None = None,
) -> dict[str, Timeline]:  # fmt: skip
    """Return steps by label, as ``thinwire plan`` simulates them from these assumptions."""
    asked = read_question(model, link=link, latency=latency, costs=None, workers=workers, ranks_per_node=ranks_per_node,
                          methods=methods, batch_size=batch, device=device, flops=flops, profile=None)  # fmt: skip
    where = (asked.profile, asked.topology, asked.costs())
    return {
        label: simulate(resolved(method, *where, **asked.where), *where, **asked.where)
        for label, method in asked.candidates
    }
