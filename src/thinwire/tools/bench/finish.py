"""The result of each row in a race: the cost of its steps, how many it needed, and so when it reached the loss."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from thinwire.tools.bench.race import StepsFactor
from thinwire.tools.bench.record import RowRecord


@dataclass(frozen=True)
class Pace:
    """The cost of a row's steps.

    Attributes:
        seconds: time of a step on the link: mean over whole periods, median over turns.
        least, most: minimum and maximum over turns.
        start_seconds: extra time of the first steps.
        apart_seconds: time of a step on ranks without a slow link.
        error: why the row has no result.
    """

    seconds: float = math.inf
    least: float = math.inf
    most: float = math.inf
    start_seconds: float = 0.0
    apart_seconds: float = 0.0
    error: str = ""


def pace_of(row: RowRecord, turns: int, compute: RowRecord) -> Pace:
    """Return the pace of a row recorded on the link in that many turns; ``compute``: the row without exchange.

    Without a link, a step takes its CPU time, stretched by the same factor as a step without exchange if ranks share
    cores.
    """
    if row.error or not row.step_seconds:
        return Pace(error=row.error or "no step was timed")
    each = len(row.step_seconds) // turns
    means = [statistics.fmean(row.step_seconds[i * each : (i + 1) * each]) for i in range(turns)]
    step = statistics.median(means)
    untimed = len(row.losses) - len(row.step_seconds)
    start = max(0.0, row.untimed_seconds - untimed * step)
    alone = statistics.fmean(compute.step_seconds)
    busy = statistics.fmean(row.host_seconds) * max(1.0, alone / statistics.fmean(compute.host_seconds))
    return Pace(step, min(means), max(means), start, min(step, max(alone, busy)))


@dataclass(frozen=True)
class Finish:
    """The final result of one row.

    Attributes:
        rate: the best factor on the learning rate.
        steps: median of the steps to the loss, relative to DDP's; None: it was not trained, or did not reach the loss.
        fewest_steps, most_steps: over seeds; None: some seed did not reach the loss.
        seeds: number of seeds.
        seconds: time to the loss, start-up included.
        least_seconds, most_seconds: minimum and maximum over seeds and turns.
        sooner: how many times sooner than DDP.
        note: why it was dropped, or failed.
        apart: whether workers train apart between exchanges; such rows count as less simple.
        bytes_per_step: bytes sent per step.
    """

    label: str
    step_seconds: float | None = None
    over_compute: float | None = None
    start_seconds: float | None = None
    rate: float = 1.0
    steps: float | None = None
    fewest_steps: float | None = None
    most_steps: float | None = None
    seeds: int = 0
    seconds: float | None = None
    least_seconds: float | None = None
    most_seconds: float | None = None
    sooner: float | None = None
    note: str = ""
    apart: bool = False
    bytes_per_step: float | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds to the loss: minimum, median and maximum; infinite if it was not reached."""
        least, median, most = (
            math.inf if seconds is None else seconds
            for seconds in (self.least_seconds, self.seconds, self.most_seconds)
        )
        return least, median, most

    @property
    def bytes_sent(self) -> float:
        """Bytes sent per step; 0 if unknown."""
        return self.bytes_per_step or 0.0


def finish(
    label: str, pace: Pace, compute: float, factor: StepsFactor | None, ddp_steps: float, note: str = ""
) -> Finish:
    """Return a row's figures; ``factor`` is None if it was not trained."""
    if pace.error:
        return Finish(label, note=f"failed: {pace.error}")
    timed = Finish(label, pace.seconds, pace.seconds / compute, pace.start_seconds, note=note)
    if factor is None:
        return timed
    middle, (low, high) = factor.median, factor.ends

    def seconds(steps: float | None, step: float) -> float | None:
        return None if steps is None else pace.start_seconds + ddp_steps * steps * step

    return replace(
        timed, rate=factor.rate, steps=middle, fewest_steps=low, most_steps=high, seeds=len(factor.factors),
        seconds=seconds(middle, pace.seconds), least_seconds=seconds(low, pace.least),
        most_seconds=seconds(high, pace.most),
    )  # fmt: skip
