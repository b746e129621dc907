"""Families of rows of which only the best counts: which one it is, and its time.

The minimum of several noisy medians lies below the true time of every variant, so a rival chosen and timed by the same
steps would look too fast. Each round therefore counts the variant that was fastest in the other rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from thinwire.bench.record import RowRecord


def families(rows: Sequence[RowRecord], rounds: int) -> list[tuple[RowRecord, dict[str, float]]]:
    """Return all rows, but only the fastest member of each family.

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
