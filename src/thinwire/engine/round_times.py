"""How long steps and exchanges take: what the period and the codec of local steps follow from."""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.engine.services import Services
from thinwire.local.settings import Local
from thinwire.planner.choose.rank import ms
from thinwire.planner.choose.worth import period_worth, shipped
from thinwire.planner.periods import best_period, mean_step, up_to

_MEASURED = 3  # periods with each codec, of which the first opens connections and does not count
_LAST = 1000  # steps whose times are kept
_THINNER = 0.9  # of the time to a loss, for a codec that sends less to be taken


class _Exchange(NamedTuple):
    """One that was waited for: seconds, and those of the processor that this rank took for it."""

    seconds: float
    compute: float


class RoundTimes:
    """How long steps take, and exchanges that are waited for: what "auto" goes by, for a period and for a delay.

    Args:
        services: of the handle.
        elements: of the model.
        beside: what an exchange computes takes nothing from the steps that go on.

    Attributes:
        said: what was measured, in words.
    """

    def __init__(self, services: Services, elements: int, *, beside: bool) -> None:
        self._services, self._elements, self._beside, self.said = services, elements, beside, ""
        self._left: float | None = None
        self._entered = (0.0, 0.0)
        self._exchange = _Exchange(0.0, 0.0)
        self._steps = deque[float](maxlen=_LAST)
        self._rounds: list[_Exchange] = []

    def anew(self) -> RoundTimes:
        """Of the same model and ranks, with nothing measured."""
        return RoundTimes(self._services, self._elements, beside=self._beside)

    def stepped(self) -> None:
        """An optimizer step has ended."""
        self._entered = time.perf_counter(), time.process_time()
        if self._left is not None:
            self._steps.append(self._entered[0] - self._left)

    def exchanged(self) -> None:
        """What was due after it has been exchanged."""
        self._left, computed = time.perf_counter(), time.process_time()
        seconds, compute = self._exchange
        began, computing = self._entered
        self._exchange = _Exchange(seconds + self._left - began, compute + computed - computing)

    @property
    def step(self) -> float:
        """Seconds of a step in which nothing is exchanged, as most of them have it."""
        return statistics.median(self._steps)

    def period(self, settings: Local, *, starting: bool = False) -> tuple[tuple[int, int] | None, int]:
        """A period has ended: what is measured of it; after enough of them what all ranks take from now on.

        ``starting``: the codec has not begun, so the exchange says nothing of it.

        Returns:
            The period and the delay, or None: more is to be measured; and which codec is next.
        """
        exchange, self._exchange = self._exchange, _Exchange(0.0, 0.0)
        if starting:
            return None, 0
        self._rounds.append(exchange)
        codecs = settings.codecs
        if len(self._rounds) < _MEASURED * len(codecs):
            return None, len(self._rounds) // _MEASURED
        # Who comes last waits for nobody: its exchange is the exchange. The slowest rank's steps are everybody's.
        exchanges = [min(self._rounds[_MEASURED * code :][1:_MEASURED]) for code in range(len(codecs))]
        steps, *columns = times_of_all(self._services, settings, [self.step, *(x for one in exchanges for x in one)])
        step, exchanges = max(steps), [_Exchange(*map(min, pair)) for pair in zip(columns[::2], columns[1::2])]
        topology = self._services.topology
        apart = topology.world_size if settings.inside is None else topology.nodes
        found, least, every = ((2, 0), 0), math.inf, settings.sync_every
        for code, (codec, (round_, compute)) in enumerate(zip(codecs, exchanges)):
            taken_away = 0.0 if self._beside else compute
            worth = period_worth(shipped(), codec, self._elements, apart)
            periods = (every,) if isinstance(every, int) else up_to(settings.sync_every_max)
            option = best_period(
                step, round_, worth,
                delay=settings.fragment_sync_delay, periods=periods, compute_seconds=taken_away,
            )  # fmt: skip
            seconds = mean_step(step, round_, *option, compute_seconds=taken_away) * worth(*option)
            if code == 0 or seconds < _THINNER * least:
                found, least = (option, code), seconds
        taken = found[1]
        self.said = f"measured: a step takes {ms(step)}, an exchange {ms(exchanges[taken].seconds)}"
        if len(codecs) > 1:
            self.said += f" in {codecs[taken].options()['dtype']}".replace("torch.", "")
        return found


def times_of_all(services: Services, settings: Local, own: Sequence[float]) -> list[tuple[float, ...]]:
    """Each of these times, of every rank; inside machines of the first, as the others only receive."""
    form, everyone = f"<{len(own)}d", settings.inside is None
    rows = enumerate(services.gather(struct.pack(form, *own)))
    first = [row for rank, row in rows if everyone or services.topology.local_rank(rank) == 0]
    return list(zip(*(struct.unpack(form, row) for row in first)))
