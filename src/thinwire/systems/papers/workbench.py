"""What papers are reproduced with: the simulator at their scale, and the lab at ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.core.events import LastWords, python
from thinwire.predict.choose import resolved
from thinwire.predict.timeline import Timeline, simulate
from thinwire.tools import lab
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

    def ranks(self, program: str, *arguments: object, cluster: lab.Cluster) -> dict[str, Any]:
        """Return what rank 0 told last of a program of :mod:`thinwire.systems.papers.ranks` that all ranks ran."""
        told: dict[str, Any] = {}

        def follow(rank: int, event: dict[str, Any]) -> None:
            if rank == 0:
                told.update(event)
                self.tell(f"{program}: {event.get('now', 'done')}")

        words = LastWords(follow)
        command = python("-m", "thinwire.systems.papers.ranks", program, *map(str, arguments))
        launched = lab.run(cluster, command, on_line=words, timeout_seconds=3600)
        if launched.exit_code:
            raise RuntimeError(words.after(f"the ranks of {program} ended with exit code {launched.exit_code}"))
        return told

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
