"""What papers are reproduced with: the simulator at their scale, and the lab at ours."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core.events import LastWords, python
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.plans import PlanTensor, make_plan
from thinwire.core.program import LocalWorld, Method
from thinwire.predict.timeline import Timeline
from thinwire.tools import lab
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.row_on_rank import Several, listed
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchSpec, Launched, RowRecord, RunRecord, run_session, seconds_to
from thinwire.tools.bench.summary import BenchResult, summarise
from thinwire.tools.cli.bench import BenchVerb
from thinwire.tools.cli.console import RunFailed
from thinwire.tools.cli.options import PlanOptions
from thinwire.tools.cli.plan_inputs import read_question

Told = Callable[[str], None]


@dataclass(frozen=True)
class Workbench:
    """Runs of this machine. ``full``: longer, and with more seeds; ``tell`` is called with what is being measured."""

    full: bool = False
    tell: Told = lambda text: None

    def bench(self, model: str, methods: str, **options: Any) -> BenchResult:
        """Return steps of the rows of ``methods``, in turns, as ``thinwire bench`` with these options measures them."""
        asked = BenchVerb(**{"steps": 8, **options, "model": model, "methods": methods})
        self.tell(f"{model}, {asked.workers} workers, link {asked.link}: {methods}")
        record, launched = self._run(asked.spec, asked.cluster)
        return summarise(asked.spec, record, emulated=launched.emulated, note=launched.note)

    def train(
        self, model: str, methods: str, *, workers: int = 2, steps: int = 240, every: int = 8
    ) -> dict[str, RowRecord]:
        """Return whole trainings, by label, on ranks that nothing slows down."""
        spec = BenchSpec(model, parse_rows(methods), workers, steps=steps, every=every, warmup=0, curves=True)
        self.tell(f"{model}, {workers} workers, {steps} steps: {methods}")
        record, _ = self._run(spec, lab.Cluster(workers))
        return {row.label: row for row in record.rows}

    def sooner(self, model: str, methods: str, loss: float, *, every: int = 10, **options: Any) -> dict[str, float]:
        """Return, by label, how many times the seconds of the last row it takes to a held-out ``loss``.

        That is the median of seeds: infinite, or 0 for the last row, where a row does not reach it in ``steps``.
        ``options`` are those of ``thinwire bench``.
        """
        found = dict[str, list[float]]()
        for seed in range(3 if self.full else 1):
            asked = BenchVerb(
                **{"steps": 400, **options, "model": model, "methods": methods, "rounds": 1, "warmup": 0, "seed": seed}
            )
            self.tell(
                f"{model}, {asked.workers} workers, link {asked.link}, seed {seed}, to a loss of {loss:g}: {methods}"
            )
            rows = self._run(replace(asked.spec, every=every, target=loss), asked.cluster)[0].rows
            last = seconds_to(rows[-1].curve, loss)
            for row in rows:
                when = seconds_to(row.curve, loss)
                ratio = 0.0 if last is None else math.inf if when is None else when / last
                found.setdefault(row.label, []).append(ratio)
        return {label: statistics.median(ratios) for label, ratios in found.items()}

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
            raise RunFailed(words.after(f"the ranks of {program} ended with exit code {launched.exit_code}"))
        return told

    def _run(self, spec: BenchSpec, cluster: lab.Cluster) -> tuple[RunRecord, Launched]:
        record, launched = run_session(spec, functools.partial(lab.run, cluster), self._follow)
        if failed := [f"{row.label}: {row.error}" for row in record.rows if row.error]:
            raise RunFailed("; ".join(failed))
        return record, launched

    def _follow(self, event: Mapping[str, Any]) -> None:
        if "step" in event:
            self.tell(f"{event['row']}: step {event['step']}, loss {event['loss']:.3f}")


@dataclass(frozen=True)
class Replicas:
    """A step of ranks in one process: their gradients, and the world that has averaged these."""

    workload: Workload
    world: LocalWorld
    gradients: list[dict[str, Tensor]]


def replicas(
    model: str, method: Method, *, workers: int = 4, steps: int, seed: int = 0, decay_from: float = 1.0
) -> Iterator[Replicas]:
    """Train in this process, in the method's buckets; yield after each step.

    The learning rate is a tenth from that share of the steps on: ``decay_from``.
    """
    workload = build_model(model, seed)
    optimizer = Several(listed(workload.optimizer(workload.model)))
    parameters = dict(workload.model.named_parameters())
    tensors = [PlanTensor(name, tuple(p.shape), method.dense(name, p.shape, False)) for name, p in parameters.items()]
    plan = make_plan(method, tensors, range(len(tensors))[::-1], (), "gloo")
    world = LocalWorld(workers, plan=plan, dense=SSGD())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("begun", group["lr"]) * (0.1 if step >= decay_from * steps else 1.0)
        ranks = []
        for rank in range(workers):
            found = torch.autograd.grad(
                workload.loss(workload.model, seed * 100_000 + step, rank), [*parameters.values()]
            )
            ranks.append(dict(zip(parameters, found)))
        for name, gradient in world.step(method, ranks)[0].items():
            parameters[name].grad = gradient
        optimizer.step()
        yield Replicas(workload, world, ranks)


def losses(
    bench: Workbench, model: str, methods: Mapping[str, Method], *, steps: int = 400
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Return held-out losses by step of the last seed, and the last over that of the first method: median of seeds."""
    lines, ratios = dict[str, list[tuple[float, float]]](), dict[str, list[float]]()
    for seed in range(3 if bench.full else 1):
        for label, method in methods.items():
            bench.tell(f"{model}, 4 workers in one process, {steps} steps, seed {seed}: {label}")
            trained = replicas(model, method, steps=steps, seed=seed, decay_from=0.75)
            kept = ((i, made) for i, made in enumerate(trained, 1) if not i % 10 or i == steps)
            lines[label] = [(i, made.workload.held_out_loss() or math.nan) for i, made in kept]
            ratios.setdefault(label, []).append(lines[label][-1][1] / next(iter(lines.values()))[-1][1])
    return lines, {label: statistics.median(found) for label, found in ratios.items()}


def predicted(model: str, methods: str | Mapping[str, Method], **options: Any) -> dict[str, Timeline]:
    """Return steps by label, as ``thinwire plan`` with these options simulates them."""
    named = methods if isinstance(methods, str) else "ssgd"
    asked = read_question(PlanOptions(model=model, methods=named, **options))
    chosen = asked.candidates if isinstance(methods, str) else methods.items()
    return {label: asked.simulated(method) for label, method in chosen}
