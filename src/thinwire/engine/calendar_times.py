"""Measure how long each fragment's exchange takes, and whether steps stay as short if fragments are sent again."""

from __future__ import annotations

import time

from thinwire.core.pricing.periods import LONGER, exposed, nanoseconds
from thinwire.core.words import milliseconds as ms
from thinwire.engine.local.rounds import Rounds
from thinwire.engine.round_times import RoundTimes, times_of_all
from thinwire.engine.services import Services

_MEASURED = 3  # periods of a kind; the first does not count: it opens connections, or merges what was sent before it


class CalendarTimes:
    """The measurements from which ``schedule="dream"`` makes its calendar.

    First come periods whose exchanges are waited for, one fragment after the other. Then come periods in which each
    fragment is sent once, and periods in which fragments are sent again if there is time. The last two are compared
    because exchanges take CPU time from training, which the time of an exchange alone does not show.

    Args:
        services: of the handle.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._alone: dict[int, list[float]] = {}
        self._periods: list[float] = []
        self._found: tuple[list[int], int] = ([], 0)  # nanoseconds of each exchange, and of a step
        self._ended = 0.0

    def anew(self) -> CalendarTimes:
        """Return a new instance for the same ranks, with nothing measured."""
        return CalendarTimes(self._services)

    def exchanged(self, index: int, seconds: float) -> None:
        """Record the seconds that one fragment's exchange took, alone."""
        self._alone.setdefault(index, []).append(seconds)

    def ended(self, rounds: Rounds, times: RoundTimes) -> str:
        """Record the end of a period; after enough periods, all ranks take another calendar.

        Args:
            rounds: the rounds whose calendar is set.
            times: the times of steps.

        Returns:
            What is known so far, in words.
        """
        now = time.perf_counter()
        self._periods.append(now - self._ended)
        self._ended = now
        if rounds.period != len(rounds.calendar):  # a period of the warm-up
            return ""
        if not rounds.trial:
            alone = [self._alone.get(fragment.index, []) for fragment in rounds.fragments]
            if min(map(len, alone)) >= _MEASURED:
                steps, *columns = times_of_all(
                    self._services, rounds.settings, [times.step, *(min(some[1:]) for some in alone)]
                )
                self._found = [nanoseconds(min(column)) for column in columns], nanoseconds(max(steps))
                rounds.follow(*self._found, again=False, trial=True)
                self._periods.clear()
        elif len(self._periods) == _MEASURED:
            rounds.follow(*self._found, again=True, trial=True)
            if self._again(rounds) == 0:
                rounds.follow(*self._found, again=False)
        elif len(self._periods) == 2 * _MEASURED:
            once, again = (min(self._periods[at + 1 : at + _MEASURED]) for at in (0, _MEASURED))
            before, after = (max(column) for column in times_of_all(self._services, rounds.settings, [once, again]))
            rounds.follow(*self._found, again=after <= LONGER * before)
        return self._said(rounds)

    def _again(self, rounds: Rounds) -> int:
        return sum(map(len, rounds.calendar)) - len(rounds.fragments)

    def _said(self, rounds: Rounds) -> str:
        exchanges, window = self._found
        if rounds.measured is None:
            return ""
        said = f"measured: a step takes {ms(window / 1e9)}, a full exchange {ms(sum(exchanges) / 1e9)}"
        late = exposed(rounds.calendar, exchanges, [window] * len(rounds.calendar))
        if late:
            said += f", of which {ms(late / 1e9)} is not hidden"
        if again := self._again(rounds):
            every, count = len(rounds.calendar), len(exchanges)
            said += f"; {count} fragments are sent {count + again} times in {every} steps"
        return said
