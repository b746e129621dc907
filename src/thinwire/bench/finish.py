"""How each row of a race ended: what its steps cost, how many it needed, and so when it was there."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from thinwire.bench.race import StepsFactor
from thinwire.bench.record import RowRecord


@dataclass(frozen=True)
class Pace:
    """What steps of a row cost.

    Attributes:
        seconds: of a step on the link: the mean over whole periods, the median of turns.
        least, most: of turns.
        start_seconds: what the first steps took more than that.
        apart_seconds: of a step on ranks that nothing slows down.
        error: why the row has no pace.
    """

    seconds: float = math.inf
    least: float = math.inf
    most: float = math.inf
    start_seconds: float = 0.0
    apart_seconds: float = 0.0
    error: str = ""


def pace_of(row: RowRecord, turns: int, compute: RowRecord) -> Pace:
    """From what was recorded on the link, in so many turns; ``compute``: the row that exchanges nothing.

    Without a link a step is what it takes of the CPU, and as much longer as one without exchange is, where ranks share
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
    """One row's end of the race.

    Attributes:
        rate: the factor on the learning rate that served it best.
        steps: median of the steps to the loss, over DDP's; None: it was not trained, or did not get there.
        fewest_steps, most_steps: over seeds; None: a seed did not get there.
        seeds: on how many.
        seconds: to the loss, start-up included.
        least_seconds, most_seconds: over seeds and turns.
        sooner: how many times sooner than DDP.
        note: why it was left behind, or failed.
        apart: whether workers train apart between exchanges: less simple than what keeps them together.
        bytes_per_step: that were sent.
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
        """Seconds to the loss: the least, the median and the most; infinite where it is not there."""
        least, median, most = (
            math.inf if seconds is None else seconds
            for seconds in (self.least_seconds, self.seconds, self.most_seconds)
        )
        return least, median, most

    @property
    def bytes_sent(self) -> float:
        """In a step; 0 where that is not known."""
        return self.bytes_per_step or 0.0


def finish(
    label: str, pace: Pace, compute: float, factor: StepsFactor | None, ddp_steps: float, note: str = ""
) -> Finish:
    """A row's figures; ``factor`` None: it was not trained."""
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
