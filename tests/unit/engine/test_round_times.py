"""What "local" takes from what it has measured: period, delay, and the codec."""

from types import SimpleNamespace

import pytest

from thinwire.engine import round_times
from thinwire.engine.round_times import RoundTimes
from thinwire.local.settings import local_settings
from thinwire.program import Topology

ELEMENTS = 1_000_000


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


def found(monkeypatch, step, exchanges, **options):
    """After so many rounds of two steps as ``local`` measures; ``exchanges``: seconds of one in each codec."""
    clock, settings = Clock(), local_settings("local", options)
    monkeypatch.setattr(round_times, "time", clock)
    times = RoundTimes(SimpleNamespace(gather=lambda own: [own, own], topology=Topology(2)), ELEMENTS)
    codes, taken = [], None
    while taken is None:
        code = codes[-1] if codes else 0
        for _ in range(2):
            clock.now += step
            times.stepped()
            times.exchanged()
        clock.now += step
        times.stepped()
        clock.now += exchanges[code]
        times.exchanged()
        taken, code = times.period(settings)
        codes.append(code)
    return taken, codes, times.said


def test_two_bits_where_the_exchange_is_long_and_eight_where_it_is_short(monkeypatch):
    taken, codes, said = found(monkeypatch, 0.1, (2.0, 0.5))
    assert codes == [0, 0, 1, 1, 1, 1]
    assert taken[1] == taken[0] - 1 > 0  # behind the next steps
    assert said == "measured: a step takes 100 ms, an exchange 500 ms in int2"
    taken, codes, said = found(monkeypatch, 0.1, (0.02, 0.01))
    assert codes == [0, 0, 1, 1, 1, 0]
    assert said == "measured: a step takes 100 ms, an exchange 20.0 ms in int8"


def test_a_codec_that_is_named_stays(monkeypatch):
    _, codes, said = found(monkeypatch, 0.1, (2.0,), codec="int8")
    assert codes == [0, 0, 0]
    assert said == "measured: a step takes 100 ms, an exchange 2000 ms"


def test_a_named_period_travels_in_eight_bits_and_auto_needs_a_period_that_is_measured():
    assert str(local_settings("local", {"sync_every": 4}).method.dtype) == "torch.int8"
    with pytest.raises(ValueError, match='codec="auto" goes with sync_every="auto"'):
        local_settings("local", {"sync_every": 4, "codec": "auto"})
