"""From records to figures: medians, spreads, exposed communication, and the floor for every exact coupled method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from thinwire.tools.bench.record import RowRecord, RunRecord
from thinwire.tools.bench.rows import COMPUTE
from thinwire.tools.bench.spec import BenchSpec

SMOOTH = 5


@dataclass(frozen=True)
class RowSummary:
    """One line of the table.

    Attributes:
        step_seconds: median over steps of the slowest rank's wall-clock seconds.
        spread_seconds: interquartile range of the same.
        exposed_seconds: step time minus that of the same ranks without any exchange.
        bytes_per_step: sent per step; ``bytes_source`` is "interface" (per node, headers included), "stats" (thinwire's
            ledger, per rank) or "formula" (per rank).
        host_seconds: median CPU seconds of the main thread in a step.
        loss: training loss, mean over ranks and the last steps, after ``loss_steps`` steps.
        speedup: how many times faster a step is than that of the ``ddp`` row; None without one.
        predicted_seconds: the planner's prediction from the measured network and model.
        waited_backward_seconds, waited_forward_seconds: time of a thinwire step waiting for communication, on rank 0.
        variants: label -> step seconds of all variants, if this is the fastest of them; see ``families``.
        why: reasons for the plan of a thinwire row; the first names what ``auto`` chose.
        error: why the row failed, or "".
    """

    label: str
    step_seconds: float | None = None
    spread_seconds: float | None = None
    exposed_seconds: float | None = None
    bytes_per_step: float | None = None
    bytes_source: str = ""
    host_seconds: float | None = None
    loss: float | None = None
    loss_steps: int = 0
    speedup: float | None = None
    predicted_seconds: float | None = None
    waited_backward_seconds: float | None = None
    waited_forward_seconds: float | None = None
    variants: dict[str, float] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class BenchResult:
    """The whole comparison.

    Attributes:
        floor_seconds: ``max(compute, forward + bytes / rate)``, below which no exact method that ends with backward can
            be.
        emulated: whether the links were emulated; if not, the link is only used to compute the floor.
    """

    model: str
    describe: str
    parameters: int
    tensors: int
    gradient_bytes: int
    workers: int
    link: str | None
    emulated: bool
    note: str
    compute_seconds: float
    forward_seconds: float
    floor_seconds: float
    rows: tuple[RowSummary, ...]

    def row(self, label: str) -> RowSummary:
        """Return the row with this label, or the first whose label begins with it."""
        for row in self.rows:
            if row.label == label:
                return row
        for row in self.rows:
            if row.label.startswith(label + " "):
                return row
        raise KeyError(label)


def floor(compute: float, forward: float, ring_bytes: float, bits_per_second: int | None) -> float:
    """Return the lower bound of a step's seconds if the average must be complete at the end of backward."""
    return compute if not bits_per_second else max(compute, forward + ring_bytes * 8 / bits_per_second)


def summarise(spec: BenchSpec, record: RunRecord, *, emulated: bool, note: str) -> BenchResult:
    """Return the figures of a run.

    Raises:
        RuntimeError: even training without exchange failed.
    """
    compute_row = next(row for row in record.rows if row.kind == COMPUTE)
    if compute_row.error:
        raise RuntimeError(f"the model does not train: {compute_row.error}")
    compute = statistics.median(compute_row.step_seconds)
    forward = statistics.median(compute_row.forward_seconds)
    baseline = next((r for r in record.rows if r.label == "ddp" and not r.error and r.step_seconds), None)
    reference = statistics.median(baseline.step_seconds) if baseline else None
    nodes = max(1, record.workers // spec.ranks_per_node)  # sums inside a node do not use its link
    ring = 2 * (nodes - 1) / nodes * record.gradient_bytes
    return BenchResult(
        model=spec.model,
        describe=record.describe,
        parameters=record.parameters,
        tensors=record.tensors,
        gradient_bytes=record.gradient_bytes,
        workers=record.workers,
        link=spec.link,
        emulated=emulated,
        note=note,
        compute_seconds=compute,
        forward_seconds=forward,
        floor_seconds=floor(compute, forward, ring, spec.link_bits),
        rows=tuple(_summary(row, variants, compute, reference) for row, variants in families(record.rows, spec.rounds)),
    )


def _summary(row: RowRecord, variants: dict[str, float], compute: float, reference: float | None) -> RowSummary:
    if row.error or not row.step_seconds:
        return RowSummary(row.label, variants=variants, error=row.error or "no step was timed")
    step = statistics.median(row.step_seconds)
    backward, forward = row.waited_seconds or (None, None)
    return RowSummary(
        label=row.label,
        step_seconds=step,
        spread_seconds=_interquartile(row.step_seconds),
        exposed_seconds=step - compute,
        bytes_per_step=row.wire_bytes,
        bytes_source=row.wire_source,
        host_seconds=statistics.median(row.host_seconds),
        loss=statistics.fmean(row.losses[-SMOOTH:]) if row.kind != COMPUTE else None,
        loss_steps=len(row.losses),
        speedup=reference / step if reference else None,
        predicted_seconds=row.predicted_seconds,
        waited_backward_seconds=backward,
        waited_forward_seconds=forward,
        variants=variants,
        why=tuple(row.why),
    )


def _interquartile(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[2] - quarters[0]


def families(rows: Sequence[RowRecord], rounds: int) -> list[tuple[RowRecord, dict[str, float]]]:
    """Return all rows, but only the fastest member of each family.

    The minimum of several noisy medians lies below the true time of every variant, so a rival chosen and timed by the
    same steps would look too fast. Each round therefore counts the variant that was fastest in the other rounds.

    Args:
        rows: rows of a run.
        rounds: rounds in which their steps were timed.

    Returns:
        The rows, each with the median seconds of all members by label if it represents a family.
    """
    found: list[tuple[RowRecord, dict[str, float]]] = []
    seen: set[str] = set()
    for row in rows:
        if not row.family:
            found.append((row, {}))
        elif row.family not in seen:
            seen.add(row.family)
            steps = {r.label: r for r in rows if r.family == row.family and not r.error and r.step_seconds}
            times = {label: statistics.median(r.step_seconds) for label, r in steps.items()}
            best = steps[min(times, key=times.__getitem__)] if times else row
            timed = chosen_elsewhere({label: r.step_seconds for label, r in steps.items()}, rounds)
            found.append((replace(best, step_seconds=timed or best.step_seconds), times))
    return found


def chosen_elsewhere(seconds: Mapping[str, Sequence[float]], rounds: int) -> list[float]:
    """Return the steps of each round, taken from the variant with the lowest median over the other rounds.

    Args:
        seconds: timed steps of each variant, round after round, equally many in each.
        rounds: number of rounds.

    Returns:
        As many seconds as one variant has; empty if there is only one round or variant, or if steps are missing.
    """
    counts = {len(steps) for steps in seconds.values()}
    if rounds < 2 or len(seconds) < 2 or len(counts) != 1 or (count := counts.pop()) % rounds:
        return []
    each = count // rounds
    found: list[float] = []
    for begin in range(0, count, each):
        end = begin + each
        others = {label: statistics.median([*s[:begin], *s[end:]]) for label, s in seconds.items()}
        found += seconds[min(others, key=others.__getitem__)][begin:end]
    return found
