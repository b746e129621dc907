"""What "dream" takes from what it has measured, on a clock that stands still but for what a test lets pass."""

import struct
from types import SimpleNamespace

import torch

from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Topology
from thinwire.engine.local import Local
from thinwire.engine.local import times as module
from thinwire.engine.local.rounds import Rounds
from thinwire.engine.local.times import CalendarTimes

EVERY = 4
WEIGHTS = {f"{name}.weight": torch.zeros(8) for name in "abcd"}


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def of_another_rank(own, longer):
    """Its steps are longer, and it waits for nobody; then its last periods are so many times as long as this one's."""
    values = struct.unpack(f"<{len(own) // 8}d", own)
    if len(values) == 2:
        return struct.pack("<2d", values[0], longer * values[1])
    return struct.pack(f"<{len(values)}d", 1.25 * values[0], *(0.5 * x for x in values[1:]))


def beside(longer=1.0):
    return SimpleNamespace(gather_everywhere=lambda own: [own, of_another_rank(own, longer)])


def settled(monkeypatch, exchanges, again_costs, handle=None, **options):
    """Calendars of all periods, and what is said; with fragments that leave again a period is so much longer."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    rounds = Rounds(Local(EVERY, schedule="dream", **options), WEIGHTS, [], 0, Topology(2))
    times = CalendarTimes(handle or beside())
    calendars, waited = [], []
    while rounds.measured is None:
        calendars.append([sorted(leaving) for leaving in rounds.calendar])
        waited.append(rounds.waited)
        if rounds.waited:
            for index, seconds in enumerate(exchanges):
                times.exchanged(index, seconds)
        for _ in range(EVERY):
            rounds.stepped()
        clock.now += EVERY * 0.08 * (1 + again_costs * (sum(map(len, rounds.calendar)) > 4))
        said = times.ended(rounds, SimpleNamespace(step=0.08))
    return calendars, waited, [sorted(leaving) for leaving in rounds.calendar], said


ONCE = [[0], [1], [2], [3]]


def test_what_leaves_again_stays_where_steps_stay_as_short(monkeypatch):
    """A step takes 100 ms, the slower rank's; an exchange 40, half of what the one that waits for the other sees."""
    calendars, waited, found, said = settled(monkeypatch, [0.08] * 4, 0.02)
    assert calendars == [ONCE] * 6 + [found] * 3
    assert waited == [True] * 3 + [False] * 6
    assert [len(leaving) for leaving in found] == [2] * 4
    assert said == (
        "measured: a step takes 100 ms, a full exchange 160 ms; 4 fragments are sent 8 times in 4 steps"
    )  # fmt: skip


def test_and_is_taken_back_where_they_become_longer(monkeypatch):
    calendars, _, found, said = settled(monkeypatch, [0.08] * 4, 0.1)
    assert calendars[:6] == [ONCE] * 6
    assert calendars[6] == calendars[7] == calendars[8] != ONCE
    assert found == ONCE
    assert said == "measured: a step takes 100 ms, a full exchange 160 ms"


def test_nothing_is_tried_where_no_time_is_left(monkeypatch):
    calendars, _, found, said = settled(monkeypatch, [0.3] * 4, 0.0)
    assert calendars == [ONCE] * 6
    assert found == ONCE
    assert said == "measured: a step takes 100 ms, a full exchange 600 ms, of which 200 ms is not hidden"


def test_a_period_is_as_long_as_the_slowest_ranks(monkeypatch):
    assert settled(monkeypatch, [0.08] * 4, 0.02, beside(0.9))[2] != ONCE
    assert settled(monkeypatch, [0.08] * 4, 0.02, beside(1.1))[2] == ONCE


def test_a_warm_up_measures_exchanges_and_decides_nothing(monkeypatch):
    monkeypatch.setattr(module, "time", Clock())
    rounds = Rounds(Local(EVERY, schedule="dream", warmup_steps=9), WEIGHTS, [], 0, Topology(2))
    times = CalendarTimes(SimpleNamespace(gather_everywhere=lambda own: [own, own]))
    decided = []
    for _ in range(9 + EVERY):
        rounds.stepped()
        for fragment in rounds.leaving():
            times.exchanged(fragment.index, 0.01)
        if rounds.ends:
            times.ended(rounds, SimpleNamespace(step=0.1))
        decided.append(rounds.trial)
    assert decided == [False] * (9 + EVERY - 1) + [True]


def test_ranks_that_only_receive_what_the_first_of_their_machine_exchanged_have_no_say(monkeypatch):
    receives = struct.pack("<5d", 0.08, *[0.001] * 4)
    handle = SimpleNamespace(gather_everywhere=lambda own: [own, receives, own, receives], topology=Topology(4, 2))
    calendars, _, _, said = settled(monkeypatch, [0.3] * 4, 0.0, handle, inside=SSGD())
    assert calendars == [ONCE] * 6
    assert "a full exchange 1200 ms" in said
