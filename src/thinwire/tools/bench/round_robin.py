"""Turns: one row runs some steps on all ranks and is timed; or each trains for a curve, or until it reaches a loss."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from thinwire.core.events import tell_event
from thinwire.tools.bench.row_on_rank import RowOnRank, StepTime, dense_ring_bytes, new_group
from thinwire.tools.bench.rows import COMPUTE, Row
from thinwire.tools.bench.session import BenchSpec, Point, RowRecord

SAME_SECONDS = 5.0
"""Within which errors of ranks are at about the same time."""


def own_interface() -> str | None:
    """Return the interface that Gloo was told to use; None if it is the loopback or was not set."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return name if name and name != "lo" and transmitted_bytes(name) is not None else None


def transmitted_bytes(name: str) -> int | None:
    """Return the bytes sent through an interface, headers included, as this process's namespace counts them."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    return None if counted is None else counted.bytes_sent


def is_node_leader() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@dataclass
class RowRun:
    record: RowRecord
    contender: RowOnRank | None = None
    bytes: float = 0.0
    deferred_seconds: float = 0.0
    exposed_seconds: float = 0.0
    timed_steps: int = 0

    def fail(self, error: str) -> None:
        if self.contender is not None:
            self.contender.close()
        self.contender, self.record.error = None, error

    @property
    def seconds(self) -> float:
        return self.record.untimed_seconds + sum(self.record.step_seconds)


@dataclass
class RoundRobin:
    """Runs turns; holds the group used for agreements, so that they do not mix with a row's own traffic."""

    rank: int
    workers: int
    control: Any
    interface: str | None = field(default_factory=own_interface)
    initial: list[str] = field(default_factory=list)

    def guarded(self, row_run: RowRun, action: Callable[[], Any]) -> Any:
        """Run something that may fail on any rank; a failure anywhere marks the row as failed everywhere.

        The first error is told, since others may follow from it, such as a time-out; of errors at about the same time,
        that of the lowest rank.
        """
        result, error = None, ""
        try:
            result = action()
        except Exception as caught:
            error = f"{time.time():.3f} {type(caught).__name__}: {caught}".splitlines()[0]
        failed = {rank: text.partition(" ") for rank, text in enumerate(self._texts(error)) if text}
        if failed:
            first = min(float(when) for when, _, _ in failed.values())
            rank = next(rank for rank, (when, _, _) in failed.items() if float(when) <= first + SAME_SECONDS)
            row_run.record.error = f"rank {rank}: {failed[rank][2]}"
            row_run.contender = None
            say(self.rank, row=row_run.record.label, error=row_run.record.error)
            return None
        return result

    def build(self, spec: BenchSpec, row: Row, row_run: RowRun) -> None:
        say(self.rank, row=row.label, state="building")
        own = row.kind != COMPUTE and not row.is_thinwire
        group = new_group(spec.operation_seconds) if own else None

        def made() -> RowOnRank:
            contender = RowOnRank(row, spec, group)
            self.initial = self.initial or contender.initial
            if self.rank == 0 and contender.initial != self.initial:  # the others start from its weights
                raise ValueError(
                    "the model's initial weights differ from those of the row before: "
                    "draw them from torch, random or numpy.random, which are seeded"
                )
            return contender

        row_run.contender = self.guarded(row_run, made)

    def run(self, row_run: RowRun, steps: int, untimed: int = 0) -> None:
        """Run ``untimed`` steps, then ``steps`` timed ones. Ranks start the timed ones together and agree at the end.

        A row that exchanges only every few steps runs whole periods, and goes on until everything it has sent is
        merged, since nothing may be in flight during the turns of others; not if ranks have their own pace. Those steps
        count if there are no untimed ones.
        """
        contender, label = row_run.contender, row_run.record.label
        if contender is None:
            return

        def some(number: int) -> list[StepTime]:
            if row_run.contender is None:  # the row has failed, on all ranks
                return []
            return self.guarded(row_run, lambda: self._steps(contender, label, number)) or []

        def until_merged() -> list[StepTime]:
            made: list[StepTime] = []
            while row_run.contender is not None and contender.travelling and len(made) < contender.period:
                made += some(1)
            return made

        early, measured = some(_whole(untimed, contender.period)), False
        while row_run.contender is not None and (stats := contender.stats) is not None and not stats.settled:
            early, measured = early + some(1), True  # it is measuring for a plan; equal on all ranks
        if measured and untimed:
            early += some(contender.period)  # whose exchange may arrive in the first timed one
        before, idle = self._sent(contender), contender.stats
        times = some(_whole(steps, contender.period))
        if not untimed:
            times += until_merged()
        if row_run.contender is None:
            return
        after, now = self._sent(contender), contender.stats
        late = until_merged()
        if row_run.contender is None:
            return
        if idle is not None and now is not None:
            deferred, exposed = row_run.deferred_seconds, row_run.exposed_seconds
            row_run.deferred_seconds = deferred + now.deferred_seconds - idle.deferred_seconds
            row_run.exposed_seconds = exposed + now.exposed_seconds - idle.exposed_seconds
        self._keep(row_run, early, times, late, None if before is None or after is None else after - before)
        contender.optimizer.zero_grad(set_to_none=True)  # its memory is free until the next turn

    def _steps(self, contender: RowOnRank, label: str, number: int) -> list[StepTime]:
        """Run steps. A loss that is not finite is reported after the last: others may still exchange with this rank."""
        made, begun = list[StepTime](), contender.steps
        while contender.steps < begun + number or not getattr(contender.sync, "in_step", True):
            made.append(took := contender.step(self.rank))
            say(self.rank, row=label, step=contender.steps, loss=round(took.loss, 4), seconds=round(took.seconds, 4))
        for step, took in enumerate(made, begun + 1):
            if not math.isfinite(took.loss):
                raise ArithmeticError(f"the loss is {took.loss} at step {step}")
        return _as_fastest(made, contender.steps - begun) if contender.row.own_pace else made

    def _sent(self, contender: RowOnRank) -> float | None:
        if self.interface is None:
            return None if contender.stats is None else contender.stats.bytes_sent
        return transmitted_bytes(self.interface) if is_node_leader() else 0

    def _keep(
        self, row_run: RowRun, early: list[StepTime], times: list[StepTime], late: list[StepTime], sent: float | None
    ) -> None:
        record = row_run.record
        assert row_run.contender is not None
        period = row_run.contender.period
        seconds = [row for part in (early, late, times) for row in _by_period(part, period)]
        untimed = len(early) + len(late)
        counts = dist.ReduceOp.MIN if row_run.contender.fastest else dist.ReduceOp.MAX
        slowest = of_all_ranks(torch.tensor(seconds, dtype=torch.float64), untimed, period, self.control, counts)
        leaders = float(is_node_leader()) if self.interface else 1.0
        sums = torch.tensor([*(t.loss for t in (*early, *times, *late)), sent or 0.0, leaders], dtype=torch.float64)
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.control)
        record.untimed_seconds += float(slowest[:untimed, 0].sum())
        timed = slowest[untimed:]
        record.step_seconds += timed[:, 0].tolist()
        record.forward_seconds += timed[:, 1].tolist()
        record.host_seconds += timed[:, 2].tolist()
        record.losses += (sums[:-2] / self.workers).tolist()
        row_run.bytes += float(sums[-2] / sums[-1])
        row_run.timed_steps += len(times)
        record.wire_bytes = row_run.bytes / row_run.timed_steps
        record.wire_source = "interface" if self.interface else "stats"
        if (stats := row_run.contender.stats) is not None:
            forward, steps = row_run.deferred_seconds, row_run.timed_steps
            record.waited_seconds = (row_run.exposed_seconds - forward) / steps, forward / steps
            record.why, record.plan = list(stats.why), row_run.contender.counted_plan
        if sent is None:
            dense = dense_ring_bytes(row_run.contender.workload.gradient_bytes, self.workers)
            every = row_run.contender.period
            record.wire_bytes = {
                "accumulate": dense / every,
                "compute": 0.0,
                "alone": 0.0,
                "ddp": dense,
                "ddp-fp16": dense / 2,
            }.get(record.kind)
            record.wire_source = "formula"

    def _texts(self, text: str, room: int = 300) -> list[str]:
        raw = text.encode()[:room]
        mine = torch.zeros(room, dtype=torch.uint8)
        mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.workers)]
        dist.all_gather(everyone, mine, group=self.control)
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in everyone]


def _whole(steps: int, period: int) -> int:
    return -(-steps // period) * period


def of_all_ranks(
    own: torch.Tensor, untimed: int, period: int = 1, group: dist.ProcessGroup | None = None,
    counts: Any = dist.ReduceOp.MAX,
) -> torch.Tensor:  # fmt: skip
    """Return the seconds ``[steps, columns]`` of the slowest rank, or of the fastest (MIN); a collective.

    The first column of a timed step: from when the last rank has ended the one before until the last has ended it. On a
    long wire ranks take turns in waiting for one another, and the slowest of each step would add up to more than the
    time. Steps of one period all count as its mean.
    """
    found = own.clone()
    found[untimed:, 0] = found[untimed:, 0].cumsum(0)
    dist.all_reduce(found, counts, group)
    found[untimed:, 0] = found[untimed:, 0].diff(prepend=found.new_zeros(1))
    for first in range(untimed, len(found), period) if period > 1 else ():
        found[first : first + period, 0] = found[first : first + period, 0].mean()
    return found


def _by_period(times: list[StepTime], period: int) -> list[list[float]]:
    """Return each step's seconds in all, of forward and of the CPU. Steps of one period all count as its mean."""
    rows = [[t.seconds, t.forward_seconds, t.host_seconds] for t in times]
    if period == 1:
        return rows
    parts = [rows[i : i + period] for i in range(0, len(rows), period)]
    return [[sum(column) / len(part) for column in zip(*part)] for part in parts for _ in part]


def _as_fastest(made: list[StepTime], number: int) -> list[StepTime]:
    """Return a slow rank's steps as those that the fastest has made meanwhile: as many on all ranks."""
    seconds, forward, host, loss = (sum(column) for column in zip(*(asdict(took).values() for took in made)))
    return [StepTime(seconds / number, forward / number, host / number, loss / len(made))] * number


def say(rank: int, **fields: Any) -> None:
    if rank == 0:
        tell_event(fields)


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
