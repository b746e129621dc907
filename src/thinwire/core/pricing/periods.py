"""How often workers that train apart exchange, and whether they wait for it: the least time to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby

LONGEST = 64
"""Steps of the longest period whose worth was measured, in a training from scratch."""

EVERY = (2, 4, 8, 16, 32, LONGEST)
"""Periods to choose from."""


def up_to(most: int) -> tuple[int, ...]:
    return tuple(every for every in EVERY if every <= max(EVERY[0], most))


def steps_late(delay: int | str, every: int) -> int:
    """Steps of a period that go on while a round travels; "full": all but one."""
    return every - 1 if isinstance(delay, str) else min(delay, every - 1)


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


LONGER = 1.05
"""Factor of a period's time from which on repeated exchanges no longer count as hidden."""

_PIECES, _MOST = 4, 64  # pieces of a model: per step, and in total; each costs a start-up


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


def layers(names: Sequence[str], sizes: Sequence[int], every: int) -> list[range]:
    """Return runs of consecutive parameters for a calendar of ``every`` steps: whole modules, small ones together.

    Example:
        >>> layers(["in.weight", "in.bias", "norm.weight", "out.weight"], [8, 2, 1, 8], 2)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    modules, begin = [], 0
    for _, some in groupby(name.rpartition(".")[0] or name for name in names):
        end = begin + len(list(some))
        modules.append(range(begin, end))
        begin = end
    count = min(len(modules), _PIECES * every, _MOST)
    runs = cut([sum(sizes[at.start : at.stop]) for at in modules], count)
    return [range(modules[run.start].start, modules[run.stop - 1].stop) for run in runs]


def calendar(exchanges: Sequence[int], windows: Sequence[int], *, apart: int | None = None) -> list[list[int]]:
    """Assign every layer once, in consecutive runs, with the least exposed time; then again where a step has time left.

    Of those, the most even load, by the sum of squares. ``windows``: time of the work that runs meanwhile, for each
    step. ``apart``: least number of steps between two exchanges of a layer; None: no layer is sent twice.

    Example:
        >>> calendar([3, 1, 1, 3], [4, 6], apart=1)
        [[0, 1], [2, 3, 1]]
    """
    steps = _assigned(exchanges, windows)
    if apart is None:
        return steps
    turns = [[step for step, some in enumerate(steps) if layer in some] for layer in range(len(exchanges))]
    for step, window in enumerate(windows):
        room = window - sum(exchanges[layer] for layer in steps[step])
        # Steps since a layer's last turn and until its next one, around the period.
        waits = [[min(way * (step - at) % len(windows) for at in turn) for way in (1, -1)] for turn in turns]
        # First the layer that is spared the most waiting, then the largest, which does not fit anywhere later.
        for layer in sorted(range(len(turns)), key=lambda i: (-waits[i][0] * waits[i][1], -exchanges[i])):
            if 0 < room >= exchanges[layer] and min(waits[layer]) >= apart:
                room -= exchanges[layer]
                steps[step].append(layer)
                turns[layer].append(step)
    return steps


def exposed(steps: Sequence[Sequence[int]], exchanges: Sequence[int], windows: Sequence[int]) -> int:
    loads = (sum(exchanges[layer] for layer in some) for some in steps)
    return sum(max(0, load - window) for load, window in zip(loads, windows, strict=True))


def nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _assigned(exchanges: Sequence[int], windows: Sequence[int]) -> list[list[int]]:
    """Find the best way to give each step a run of consecutive layers, in order; a run may be empty."""
    sums, count = [0, *accumulate(exchanges)], len(exchanges)
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # number of layers -> (exposed, sum of squared loads)
    begins: list[dict[int, int]] = []
    for window in windows:
        found: dict[int, tuple[int, int]] = {}
        begun: dict[int, int] = {}
        for begin, (late, squares) in best.items():
            for end in range(begin, count + 1):
                load = sums[end] - sums[begin]
                cost = late + max(0, load - window), squares + load * load
                if end not in found or cost < found[end]:
                    found[end], begun[end] = cost, begin
        best = found
        begins.append(begun)
    steps, end = [], count
    for begun in reversed(begins):
        steps.append(list(range(begun[end], end)))
        end = begun[end]
    return steps[::-1]
