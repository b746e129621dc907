"""What "local" takes from what it has measured: period, delay, and the codec."""

import struct
import tracemalloc
from types import SimpleNamespace

import pytest

from thinwire.core.methods.cast import Cast
from thinwire.core.pricing.periods import best_period, mean_step
from thinwire.core.program import Topology
from thinwire.core.words import milliseconds as ms
from thinwire.engine.local import times as module
from thinwire.engine.local.settings import local_settings
from thinwire.engine.local.times import RoundTimes
from thinwire.predict.choose.worth import period_worth, shipped

ELEMENTS = 1_000_000


class Clock:
    now = computed = 0.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.computed


def found(
    monkeypatch, step, exchanges, ranks=lambda own: [own, own], per_node=1, computes=0.0, beside=False, **options
):
    """After so many rounds of two steps as ``local`` measures.

    Args:
        step: seconds.
        exchanges: seconds of one in each codec.
        ranks: what all of them have measured, given this one's.
        per_node: ranks of each of two machines.
        computes: the share of an exchange that is encoding.
        beside: on a core of its own.
    """
    clock, settings = Clock(), local_settings("local", options)
    monkeypatch.setattr(module, "time", clock)
    times = RoundTimes(
        SimpleNamespace(gather_everywhere=ranks, topology=Topology(2 * per_node, per_node)), ELEMENTS, beside=beside
    )
    codes, taken = [], None
    while taken is None:
        code = codes[-1] if codes else settings.first_code
        for _ in range(2):
            clock.now += step
            times.stepped()
            times.exchanged()
        clock.now += step
        times.stepped()
        clock.now += exchanges[code]
        clock.computed += computes * exchanges[code]
        times.exchanged()
        taken, code = times.period(settings)
        codes.append(code)
    return taken, codes, times.said


def test_two_bits_where_the_exchange_is_long_and_four_where_it_is_short(monkeypatch):
    taken, codes, said = found(monkeypatch, 0.1, (1.2, 0.35))
    assert codes == [1, 1, 0, 0, 0, 1]
    assert 0 < taken[1] <= 6  # behind as many of the next steps as it takes
    assert said == "measured: a step takes 100 ms, an exchange 350 ms in int2"
    taken, codes, said = found(monkeypatch, 0.1, (0.02, 0.01))
    assert codes == [1, 1, 0, 0, 0, 0]
    assert said == "measured: a step takes 100 ms, an exchange 20.0 ms in int4"


@pytest.mark.parametrize("length", [4.1, 10, 100])
def test_where_two_bits_take_long_four_are_not_waited_for(monkeypatch, length):
    _, codes, said = found(monkeypatch, 0.1, (None, 0.1 * length))
    assert codes == [1, 1, 1]
    assert said.endswith(" in int2")

    def seconds(codec, exchange):
        worth = period_worth(shipped(), Cast(codec), ELEMENTS, 2)
        return mean_step(0.1, exchange, *(found := best_period(0.1, exchange, worth))) * worth(*found)

    assert seconds("int2", 0.1 * length) < 0.9 * seconds("int8", 0.3 * length)  # nor would they have been taken


def test_ranks_that_only_receive_do_not_say_how_long_an_exchange_takes(monkeypatch):
    def ranks(own):
        receiver = struct.pack("<3d", 0.1, 0.0, 0.0)  # came after the first rank of its machine had it all
        return [own, receiver, own, receiver]

    _, _, said = found(monkeypatch, 0.1, (2.0,), ranks, 2, codec="int8", inside="ssgd")
    assert said == "measured: a step takes 100 ms, an exchange 2000 ms"


@pytest.mark.parametrize(("computes", "beside", "late"), [(0.0, False, True), (1.0, False, False), (1.0, True, True)])
def test_no_step_hides_what_an_exchange_takes_from_the_same_processor(monkeypatch, computes, beside, late):
    options = {"codec": "int8", "sync_every": 4, "fragment_sync_delay": "auto"}
    (_, delay), _, _ = found(monkeypatch, 0.1, (2.0,), computes=computes, beside=beside, **options)
    assert (delay > 0) is late


def test_a_codec_that_is_named_stays(monkeypatch):
    _, codes, said = found(monkeypatch, 0.1, (2.0,), codec="int8")
    assert codes == [0, 0, 0]
    assert said == "measured: a step takes 100 ms, an exchange 2000 ms"


def test_a_named_period_travels_in_eight_bits_and_auto_needs_a_period_that_is_measured():
    assert str(local_settings("local", {"sync_every": 4}).method.dtype) == "torch.int8"
    with pytest.raises(ValueError, match='codec="auto" needs sync_every="auto"'):
        local_settings("local", {"sync_every": 4, "codec": "auto"})


@pytest.mark.parametrize(("exchange", "most"), [(0.001, 1), (0.25, 3), (5.0, 7)])
def test_a_named_period_stays_and_only_what_hides_its_exchange_is_found(monkeypatch, exchange, most):
    options = {"codec": "int8", "sync_every": 8, "fragment_sync_delay": "auto"}
    (every, delay), codes, said = found(monkeypatch, 0.1, (exchange,), **options)
    assert every == 8
    assert delay <= most
    assert codes == [0, 0, 0]
    assert said == f"measured: a step takes 100 ms, an exchange {ms(exchange)}"


def test_a_long_training_keeps_no_more_times_than_a_short_one():
    times = RoundTimes(SimpleNamespace(), ELEMENTS, beside=False)
    held, own = [], tracemalloc.Filter(True, module.__file__)
    tracemalloc.start()
    for _ in range(2):
        for _ in range(5_000):
            times.stepped()
            times.exchanged()
        taken = tracemalloc.take_snapshot().filter_traces([own])  # threads of other tests take some, too
        held.append(sum(trace.size for trace in taken.traces))
    tracemalloc.stop()
    assert held[0] > 0
    assert held[1] - held[0] < 20_000
