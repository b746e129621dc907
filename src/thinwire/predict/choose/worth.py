"""How many steps a method needs for one step of plain averaging: a compressed step is worth less than an exact one.

The table was measured by ``benchmarks/race.py``: each row at its best learning rate, to DDP's loss early in a run, on
seeds other than those used to find that rate; or over whole runs whose learning rate rises and falls, which count more.
A method that was not measured has no factor and is never recommended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from thinwire.core.methods.cast import Cast
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.periods import CODES, best_round, up_to
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Topology
from thinwire.core.records import UNREADABLE
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.local_steps import Accumulated, OneWorker, OwnPace, Periodic, is_plain
from thinwire.predict.timeline.simulate import computing, network_free

TABLE = Path(__file__).with_name("worth.json")


@dataclass(frozen=True)
class Worth:
    """Steps to a loss over those of plain averaging: least, median, most over seeds; infinite if one failed."""

    low: float
    middle: float
    high: float
    source: str

    @property
    def known(self) -> bool:
        return math.isfinite(self.middle)


WorthOf: TypeAlias = Callable[[Method, int, int], Worth]
"""(method, elements of the model, ranks) -> what its steps are worth; ``UNKNOWN`` if it was never measured."""

_FAR_STEPS, _FAR_SIZE = 1.5, 4
"""A method that needed 1.5 times the steps may need any number on a model at least four times as large; not local steps
over whole runs, which one worker alone bounds: both need fewer with 3.3 than with 1.1 million parameters."""

_ONE_SEED = 1.05
"""What the steps of seeds differ by; a row of one seed may be so far off."""

EXACT = Worth(1.0, 1.0, 1.0, "exact")
UNKNOWN = Worth(math.inf, math.inf, math.inf, "not measured")


@dataclass(frozen=True)
class MeasuredWorth:
    """One row of the table, of a method or the codec of local steps; a factor per seed (None: it did not get there).

    ``options``: numbers are minimum values for which the row holds (more is sent), as are bits in whole runs; other
    words must be equal. ``delay``: most steps that run while an exchange is in flight. ``look``: beta.
    ``steps``: of whole runs; 0: to a loss early in a run. ``local``: needed where ``every`` is 1, for local steps.
    """

    method: str
    options: Mapping[str, Any]
    every: int
    delay: int
    elements: int
    workers: int
    factors: tuple[float | None, ...]
    look: float = 0.0
    steps: int = 0
    local: bool = False

    def __post_init__(self) -> None:
        numbers = (self.every, self.elements, self.workers, *(factor for factor in self.factors if factor is not None))
        if not self.factors or not all(number > 0 and math.isfinite(number) for number in numbers) or self.delay < 0:
            raise ValueError(f"{self.method} has no such number of steps: {self}")

    def speaks_for(self, method: Method) -> bool:
        """Return whether the row holds for a method: it sends at least as much, at least as often, and no later."""
        every, delay, look = 1, 0, 0.0
        apart = isinstance(method, Periodic) and not is_plain(method)
        if isinstance(method, Periodic):
            if method.every is None or method.delay == "auto" or method.outer:
                return False
            every, delay, look = method.every, method.travelling, method.look
            method = method.code
        if method.name != self.method or every > self.every or apart != self.apart:
            return False
        if delay > self.delay or (delay == 0) != (self.delay == 0) or look != self.look:
            return False
        bits = _bits if self.steps else _word
        return all(_covers(bits(getattr(method, k)), bits(v)) for k, v in self.options.items())

    @property
    def apart(self) -> bool:
        """Whether workers train apart between exchanges."""
        return self.local or (self.every > 1 and self.method != Accumulated.name)

    @property
    def sends(self) -> list[float]:
        return [-float(v) for v in map(_bits, self.options.values()) if isinstance(v, (int, float))]

    def worth(self, workers: int, by: str = "measured") -> Worth:
        """Return the figures; needing fewer steps than exact averaging is luck. ``by``: how their source begins.

        The steps of one worker alone grow as a power of the number of workers that it is held against.
        """
        power = math.log(workers, self.workers) if self.method == OneWorker.name else 1.0
        ordered = sorted(math.inf if factor is None else max(1.0, factor) ** power for factor in self.factors)
        low, high = ordered[0], ordered[-1]
        if len(ordered) == 1:
            low, high = max(1.0, low / _ONE_SEED), high * _ONE_SEED
        source = f"{by} with {self.elements / 1e6:.2g} M parameters, {self.workers} workers"
        source += f", whole runs of {self.steps:,} steps" if self.steps else ""
        source += f"; {workers} workers need more" if self.apart and workers > self.workers else ""
        return Worth(low, ordered[len(ordered) // 2], high, source)


def _covers(value: Any, least: Any) -> bool:
    if isinstance(least, (int, float)) and isinstance(value, (int, float)):
        return value >= least
    return bool(value == least)


def _word(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else str(value).removeprefix("torch.")


def _bits(value: Any) -> Any:
    """Return the bits of a code, such as 8 of "int8"."""
    word = _word(value)
    return int(word[3:]) if isinstance(word, str) and word.startswith("int") and word[3:].isdigit() else word


def worth_from(rows: tuple[MeasuredWorth, ...], by: str = "measured") -> WorthOf:
    """Return a look-up of a method's row: of the longest runs, nearest in ranks, in size, then in what it sends.

    One worker alone, and DDP that accumulates, are known for any model and number of workers: where no row has them, by
    the table in the package.
    """

    def worth_of(method: Method, elements: int, workers: int) -> Worth:
        if method.exact or workers == 1:
            return EXACT
        if method.name == "cast" and not method.has_residual:
            return Worth(1.0, 1.0, 1.0, "rounded to 16 bits")
        found, plain = [row for row in rows if row.speaks_for(method)], is_plain(method)
        if isinstance(method, Periodic) and not plain:  # more workers lose more by training apart: no others' rows
            known = {row.workers for row in rows if row.apart and row.look == method.look}
            near = min(known, key=lambda count: abs(math.log(count / workers)), default=workers)
            found = [row for row in found if row.workers == near]
        if not found:
            return shipped()(method, elements, workers) if plain and rows != _shipped_rows() else UNKNOWN

        def apart(row: MeasuredWorth) -> tuple[int, float, float, int, int, list[float]]:
            return (
                -row.steps,
                abs(math.log(row.workers / workers)),
                abs(math.log(row.elements / max(1, elements))),
                row.every,
                row.delay,
                row.sends,
            )

        nearest = min(found, key=apart)
        value = nearest.worth(workers, by)
        far = value.middle > _FAR_STEPS and elements > _FAR_SIZE * nearest.elements
        bounded = plain or (nearest.apart and nearest.steps)
        return UNKNOWN if far and not bounded else value

    return worth_of


def between(worth: WorthOf) -> WorthOf:
    """Return what steps are worth with workers of any number and, for :class:`OwnPace`, of any speed.

    This is a model: workers at their own pace are as many as their steps are of the fastest one's, 3 for speeds of 1,
    1, 0.5 and 0.5; and between 1, 2, 4, 8, ... workers, the numbers that the shipped table knows, steps to a loss are a
    power of the number. Local steps of so many workers count beside plain averaging of all, as others do.
    """

    def of(method: Method, elements: int, workers: float) -> Worth:
        below = 2 ** int(math.log2(workers))
        share = math.log2(workers / below)
        if not share:
            return worth(method, elements, below)
        fewer, more = worth(method, elements, below), worth(method, elements, 2 * below)
        ends = ((fewer.low, more.low), (fewer.middle, more.middle), (fewer.high, more.high))
        low, middle, high = (a ** (1 - share) * b**share for a, b in ends)
        return Worth(low, middle, high, more.source)

    def worth_of(method: Method, elements: int, workers: int) -> Worth:
        if not isinstance(method, OwnPace):
            return of(method, elements, workers)
        full = sum(method.made) / (method.every or 1)
        found, lone = of(method, elements, full), OneWorker()
        more = of(lone, elements, workers).middle / of(lone, elements, full).middle
        return Worth(found.low * more, found.middle * more, found.high * more, found.source)

    return worth_of


def period_worth(
    worth: WorthOf, codec: Method, elements: int, workers: int, look: float = 0.0, kind: Any = Periodic
) -> Callable[[int, int], float]:
    """Return (period, delay) -> steps to a loss of local steps; where not measured, without a look, or of 8 bits."""
    ways = [(codec, look), (codec, 0.0), (Cast("int8"), 0.0)]

    def steps_with(way: tuple[Method, float]) -> Callable[[int, int], float]:
        return lambda every, delay: worth(kind(way[0], every, delay, look=way[1]), elements, workers).middle

    def measured(way: tuple[Method, float]) -> bool:
        return any(math.isfinite(steps_with(way)(2, delay)) for delay in (0, 1))  # delays that any row covers

    return steps_with(next(filter(measured, ways), ways[-1]))


def read_worth(path: Path) -> WorthOf:
    """Read a table that ``thinwire race`` wrote, or raise ``ValueError``. Sources name the model that raced."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        by = f"your race of {data['race']['model']}" if "race" in data else "your race"
        rows = rows_of(data)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ValueError(f"{path} holds no table of steps to a loss as written by thinwire race") from error
    if not rows:
        raise ValueError(f"{path} tells the steps of no method: the race trained none, so race for more --minutes")
    return worth_from(rows, by)


def rows_of(data: Any) -> tuple[MeasuredWorth, ...]:
    """Return the rows of a table as it stands in a file."""
    return tuple(MeasuredWorth(**{**row, "factors": tuple(row["factors"])}) for row in data["rows"])


@cache
def _shipped_rows() -> tuple[MeasuredWorth, ...]:
    return rows_of(json.loads(TABLE.read_text(encoding="utf-8")))


@cache
def shipped() -> WorthOf:
    return worth_from(_shipped_rows())


def resolved(
    method: Method,
    model_profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    *,
    worth: WorthOf | None = None,
    **where: Any,
) -> Method:
    """Return the method; of local steps with what ``attach`` would choose: codec, period and delay.

    ``where``: as in ``simulate``.
    """
    if not isinstance(method, Periodic) or (None not in (method.every, method.codec) and method.delay != "auto"):
        return method
    workers, slowdown = topology.world_size, where.get("slowdown", [1.0])
    once = model_profile.forward_seconds + sum(model_profile.backward_seconds)
    kind = partial(OwnPace, speeds=method.speeds) if isinstance(method, OwnPace) else Periodic
    codecs = tuple(map(Cast, CODES)) if method.codec is None else (method.codec,)
    periods = up_to(method.most) if method.every is None else (method.every,)
    waits = [replace(method, codec=codec, every=1, delay=0) for codec in codecs]

    def round_seconds(waited: Method, prices: Costs) -> float:
        step = once * computing(waited, slowdown)
        return simulate(waited, model_profile, topology, prices, **where).step_seconds - step

    free = replace(costs, exchanges=network_free(costs, startup=0, rest=0).exchanges)
    shared = where.get("shared_compute", True)
    rounds = [
        (
            round_seconds(waited, costs),
            round_seconds(waited, free) if shared else 0.0,
            period_worth(worth or shipped(), codec, model_profile.elements, workers, method.look, kind),
        )
        for waited, codec in zip(waits, codecs)
    ]
    index, (every, delay) = best_round(once * computing(method, slowdown), rounds, delay=method.delay, periods=periods)
    return replace(method, codec=codecs[index], every=every, delay=delay)
