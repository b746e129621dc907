"""How often workers that train apart exchange, and whether they wait for it: the least time to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

LONGEST = 64
"""Steps of the longest period whose worth was measured, in a training from scratch."""

EVERY = (1, 2, 4, 8, 16, 32, LONGEST)
"""Periods to choose from."""

THINNER = 0.95
"""A codec that sends less is taken if it needs less than this share of the time to a loss."""

CODES = ("int4", "int2")
"""From which local steps choose; the one that sends more first."""


def up_to(most: int, own_pace: bool = False) -> tuple[int, ...]:
    """Return the periods to choose from; at their own pace workers need two steps at least."""
    return tuple(every for every in EVERY if 1 + own_pace <= every <= most)


def steps_late(delay: int | str, every: int) -> int:
    """Steps of a period that go on while a round travels; "full": all but one."""
    return every - 1 if isinstance(delay, str) else min(delay, every - 1)


def own_steps(period: int, share: float) -> int:
    """Steps of a machine at its own pace in a period of the fastest one's steps; ``share``: of that one's speed.

    From 0.9 on it makes as many: times of equal machines differ by less.

    Example:
        >>> own_steps(8, 0.95), own_steps(8, 0.5), own_steps(8, 0.01)
        (8, 4, 1)
    """
    return period if share >= 0.9 else max(1, round(period * share))


def mean_step(
    step_seconds: float, round_seconds: float, every: int, delay: int, *, compute_seconds: float = 0.0
) -> float:
    """Of a period whose round travels while ``delay`` steps go on; ``compute_seconds`` of it no step hides.

    Example:
        >>> mean_step(1.0, 3.0, 4, 0), mean_step(1.0, 3.0, 4, 2), mean_step(1.0, 3.0, 4, 3, compute_seconds=2.0)
        (1.75, 1.25, 1.5)
    """
    travels = max(0.0, round_seconds - compute_seconds)
    return step_seconds + (round_seconds - travels + max(0.0, travels - delay * step_seconds)) / every


def best_period(
    step_seconds: float,
    round_seconds: float,
    steps: Callable[[int, int], float],
    *,
    delay: int | str = "auto",
    periods: Sequence[int] = EVERY,
    compute_seconds: float = 0.0,
) -> tuple[int, int]:
    """Steps of a period, and how many of them go on while a round travels.

    ``steps`` of (period, delay): steps to a loss, over those of exact averaging; infinite: not known. ``delay``: a
    number; "full": all but one; "auto": any, up to what hides a round. ``compute_seconds`` of the exchange are taken
    from the steps which go on: encoding on their processor.
    """
    travels = max(0.0, round_seconds - compute_seconds)
    hides = math.ceil(travels / step_seconds) if step_seconds > 0 else LONGEST
    options = []
    for every in periods:
        some = range(min(hides, every - 1) + 1) if delay == "auto" else [steps_late(delay, every)]
        options += [(every, late) for late in some]
    known = [option for option in options if math.isfinite(steps(*option))] or options[:1]

    def seconds(option: tuple[int, int]) -> float:
        mean = mean_step(step_seconds, round_seconds, *option, compute_seconds=compute_seconds)
        return mean * min(steps(*option), 1e9)

    return min(known, key=seconds)


def best_round(
    step_seconds: float,
    rounds: Sequence[tuple[float, float, Callable[[int, int], float]]],
    *,
    delay: int | str,
    periods: Sequence[int],
) -> tuple[int, tuple[int, int]]:
    """Return which of several codecs' rounds to make, with its period and delay; see ``best_period`` and ``THINNER``.

    ``rounds``: of each codec, the one that sends most first: seconds, those of them that no step hides, and its steps.
    """
    found, least = (0, (0, 0)), math.inf
    for index, (seconds, compute, steps) in enumerate(rounds):
        option = best_period(step_seconds, seconds, steps, delay=delay, periods=periods, compute_seconds=compute)
        mean = mean_step(step_seconds, seconds, *option, compute_seconds=compute) * steps(*option)
        if index == 0 or mean < THINNER * least:
            found, least = (index, option), mean
    return found


def cut(sizes: Sequence[int], count: int) -> Iterator[range]:
    """Yield runs of consecutive indices, cut where the sum passes the next 1 / ``count`` of all; none is empty."""
    total, seen, made, begin = sum(sizes), 0, 0, 0
    for place, size in enumerate(sizes):
        seen += size
        left = len(sizes) - place - 1
        full = seen * count >= total * (made + 1) or left == count - made - 1
        if full and made < count - 1:
            yield range(begin, place + 1)
            begin, made = place + 1, made + 1
    yield range(begin, len(sizes))
