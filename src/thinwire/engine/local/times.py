"""From measured steps and exchanges to the period, delay and codec of local steps."""

from __future__ import annotations

import statistics
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.pricing.periods import best_round, up_to
from thinwire.core.words import milliseconds as ms
from thinwire.engine.local.settings import Local
from thinwire.engine.services import Services
from thinwire.predict.choose.worth import period_worth, shipped

_MEASURED = 3  # periods of a kind; the first does not count: it opens connections, or merges what was sent before it
_LAST = 1000  # number of steps whose times are kept
_LONG = 4  # steps: if an exchange in 2 bits takes more, one in more bits loses by any measured worth


class _Exchange(NamedTuple):
    """An exchange that training waited for: its seconds, and the CPU seconds that this rank spent on it."""

    seconds: float
    compute: float


class RoundTimes:
    """Times of steps and of exchanges waited for. ``beside``: their computation takes no time from other steps."""

    def __init__(self, services: Services, elements: int, *, beside: bool) -> None:
        self._services, self._elements, self._beside = services, elements, beside
        self.said = ""  # what was measured, in words
        self._left: float | None = None
        self._entered = (0.0, 0.0)
        self._exchange = _Exchange(0.0, 0.0)
        self._steps = deque[float](maxlen=_LAST)
        self._rounds: list[_Exchange] = []

    def stepped(self) -> None:
        self._entered = time.perf_counter(), time.process_time()
        if self._left is not None:
            self._steps.append(self._entered[0] - self._left)

    def exchanged(self) -> None:
        self._left, computed = time.perf_counter(), time.process_time()
        seconds, compute = self._exchange
        began, computing = self._entered
        self._exchange = _Exchange(seconds + self._left - began, compute + computed - computing)

    @property
    def step(self) -> float:
        return statistics.median(self._steps)  # not counting exchanges

    def period(self, settings: Local, *, starting: bool = False) -> tuple[tuple[int, int] | None, int]:
        """Record the end of a period. Return period and delay (None: more is to be measured), and the codec's index."""
        exchange, self._exchange = self._exchange, _Exchange(0.0, 0.0)
        if starting:
            return None, settings.first_code
        self._rounds.append(exchange)
        codecs = settings.codecs
        codes = [settings.first_code - i for i in range(len(self._rounds) // _MEASURED)]  # measured so far
        if len(self._rounds) % _MEASURED:
            return None, settings.first_code - len(codes)
        # The last rank to arrive waits for nobody, so the shortest exchange counts; of steps, the
        # slowest rank's, or at its own pace the fastest's.
        own = [min(self._rounds[_MEASURED * i :][1:_MEASURED]) for i in range(len(codes))]
        steps, *columns = times_of_all(self._services, settings, [self.step, *(x for one in own for x in one)])
        step, shortest = (
            (min if settings.own_pace else max)(steps),
            (_Exchange(*map(min, pair)) for pair in zip(columns[::2], columns[1::2])),
        )
        exchanges = dict(zip(codes, shortest))
        if len(codes) < len(codecs) and exchanges[codes[-1]].seconds <= _LONG * step:
            return None, codes[-1] - 1
        workers = settings.workers(self._services.topology)
        every, sending_most = settings.sync_every, sorted(exchanges)
        rounds = [
            (
                exchanges[code].seconds,
                0.0 if self._beside else exchanges[code].compute,
                period_worth(shipped(), codecs[code], self._elements, workers, settings.ahead),
            )
            for code in sending_most
        ]
        periods = (every,) if isinstance(every, int) else up_to(settings.sync_every_max, settings.own_pace)
        index, option = best_round(step, rounds, delay=settings.fragment_sync_delay, periods=periods)
        taken = sending_most[index]
        self.said = f"measured: a step takes {ms(step)}, an exchange {ms(exchanges[taken].seconds)}"
        if len(codecs) > 1:
            self.said += f" in {codecs[taken].options()['dtype']}".replace("torch.", "")
        return option, taken


def times_of_all(services: Services, settings: Local, own: Sequence[float]) -> list[tuple[float, ...]]:
    """Return, for each time, the values of all ranks; with ``inside``, of each machine's first rank, which sends."""
    form, everyone = f"<{len(own)}d", settings.inside is None
    rows = enumerate(services.gather_everywhere(struct.pack(form, *own)))
    first = [row for rank, row in rows if everyone or services.topology.local_rank(rank) == 0]
    return list(zip(*(struct.unpack(form, row) for row in first)))
