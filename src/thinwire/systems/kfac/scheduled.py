"""Options that change during training: decreasing damping, less frequent statistics and inversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thinwire.core.checks import check_count

Damping = float | Callable[[int], float]
Interval = int | Callable[[int], int]
Number = TypeVar("Number", int, float)


def stepped(first: Number, factor: float, at: Sequence[int]) -> Callable[[int], Number]:
    """Return a function: ``first``, times ``factor`` from each step in ``at`` on; rounded if ``first`` is an integer.

    Example:
        >>> damping = stepped(0.008, 0.5, at=(1000, 2000))
        >>> [damping(step) for step in (0, 999, 1000, 5000)]
        [0.008, 0.008, 0.004, 0.002]
        >>> inv_update_steps = stepped(10, 10, at=(500,))
        >>> [inv_update_steps(step) for step in (499, 500)]
        [10, 100]
    """
    check_positive("first", first)
    check_positive("factor", factor)

    def value(step: int) -> Number:
        found = first * factor ** sum(step >= one for one in at)
        return max(1, round(found)) if isinstance(first, int) else found

    return value


def check_positive(name: str, value: Any) -> float:
    """Return ``value`` as float after checking that it is a finite number above 0.

    Raises:
        ValueError: it is not.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a number above 0")
    return float(value)


def interval_at(name: str, interval: Interval, step: int) -> int:
    """Return the interval at a step.

    Raises:
        ValueError: the user's function returned something other than an integer of at least 1.
    """
    if not callable(interval):
        return interval
    check_count(f"{name}({step})", found := interval(step), 1)
    return found
