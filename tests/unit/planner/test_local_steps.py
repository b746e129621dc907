"""Local steps on the simulator's timeline, against the formula that they follow where nothing shares the processor."""

import math

import pytest

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.periods import best_period, up_to
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Topology
from thinwire.predict.choose import DEVICES, resolved
from thinwire.predict.choose.worth import shipped
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.local_steps import Periodic

PROFILE = builtin("resnet50")
STEP = PROFILE.forward_seconds + sum(PROFILE.backward_seconds)


def costs(bits, workers=4):
    return Costs.of_link(bits, 50e-6, workers, 1, compute=DEVICES["a100"].compute())


def simulated(method, bits, workers=4, shared=False):
    return simulate(method, PROFILE, Topology(workers), costs(bits, workers), shared_compute=shared)


def round_seconds(codec, bits, workers=4):
    """Of a round alone: with nothing else to do, a step is its round."""
    free = PROFILE.scaled(0.0)
    prices = costs(bits, workers)
    return simulate(Periodic(codec, 1, 0), free, Topology(workers), prices, shared_compute=False).step_seconds


@pytest.mark.parametrize("codec", [SSGD(), Cast("int8"), PowerSGD(rank=4)], ids=lambda c: c.name)
@pytest.mark.parametrize("bits", [1e7, 1e8, 1e10])
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (8, "full"), (8, 3)])
def test_a_mean_step_follows_the_formula(codec, bits, every, delay):
    """T = t + max(0, T_round - delay t) / H, as an exchange that is back in time costs nothing."""
    found = simulated(Periodic(codec, every, delay), bits)
    waits = max(0.0, round_seconds(codec, bits) - (every - 1 if delay == "full" else delay) * STEP)
    assert found.step_seconds == pytest.approx(STEP + waits / every, rel=1e-9)
    assert found.every == every


def priced(every, delay):
    """What a test takes a period to cost: a tenth more steps for each doubling, and for each step of delay."""
    return 1 + 0.1 * math.log2(every) + 0.1 * delay


@pytest.mark.parametrize("delay", ["auto", "full", 0, 2])
@pytest.mark.parametrize("round_", [0.0, 0.3, 1.0, 2.5, 7.0, 40.0])
def test_the_period_has_the_least_time_to_a_loss(round_, delay):
    every, chosen = best_period(1.0, round_, priced, delay=delay)
    delays = {"auto": lambda e: range(e), "full": lambda e: {e - 1}, 0: lambda e: {0}, 2: lambda e: {min(2, e - 1)}}
    every_one = [(e, d) for e in (1, 2, 4, 8, 16, 32, 64) for d in delays[delay](e)]
    assert (every, chosen) in every_one
    least = min((1.0 + max(0, round_ - d) / e) * priced(e, d) for e, d in every_one)
    assert (1.0 + max(0, round_ - chosen) / every) * priced(every, chosen) == pytest.approx(least)


def test_what_nobody_measured_is_not_chosen():
    known = {(4, 0): 1.1}
    assert best_period(1.0, 9.0, lambda e, d: known.get((e, d), math.inf)) == (4, 0)
    assert best_period(1.0, 9.0, lambda e, d: math.inf) == (1, 0)
    assert best_period(1.0, 9.0, priced, periods=up_to(4))[0] <= 4


@pytest.mark.parametrize("bits", [1e8, 1e9])
@pytest.mark.parametrize(("device", "shared"), [("a100", False), ("cpu", False), ("cpu", True)])
def test_resolved_is_the_best_of_all_periods(bits, device, shared):
    """On the simulator's own steps, with the table that is shipped: no step hides what a shared processor encodes."""
    worth, topology, where = shipped(), Topology(4), {"shared_compute": shared}

    def costs(bits):
        return Costs.of_link(bits, 50e-6, 4, 1, compute=DEVICES[device].compute())

    found = resolved(Periodic(Cast("int8")), PROFILE, topology, costs(bits), **where)
    assert resolved(found, PROFILE, topology, costs(bits), **where) is found
    assert resolved(SSGD(), PROFILE, topology, costs(bits), **where) == SSGD()

    def seconds(every, delay):
        method = Periodic(Cast("int8"), every, delay)
        step = simulate(method, PROFILE, topology, costs(bits), **where).step_seconds
        return step * worth(method, PROFILE.elements, 4).middle

    least = min(seconds(every, delay) for every in (2, 4, 8, 16, 32, 64) for delay in range(every))
    if math.isfinite(least):
        assert seconds(found.every, found.delay) == pytest.approx(least)


def test_a_period_must_be_chosen_before_it_is_simulated():
    with pytest.raises(ValueError, match="resolved chooses one"):
        simulated(Periodic(Cast("int8")), 1e9)


def test_bytes_are_the_codecs_over_the_period():
    whole, third = simulated(Periodic(SSGD(), 1, 0), 1e9), simulated(Periodic(SSGD(), 3, 0), 1e9)
    assert whole.bytes_sent == pytest.approx(simulate(SSGD(), PROFILE, Topology(4), costs(1e9)).bytes_sent, rel=1e-3)
    assert third.bytes_sent == pytest.approx(whole.bytes_sent / 3, rel=1e-6)


def test_a_codec_of_two_phases_counts_both():
    """ACP's two factors have two lengths: a period of each, and the mean of both."""
    found = simulated(Periodic(ACP(rank=4), 4, 0), 1e7)
    assert found.step_seconds == pytest.approx(STEP + round_seconds(ACP(rank=4), 1e7) / 4, rel=1e-9)


def test_what_shares_the_processor_delays_training():
    apart, shared = (simulated(Periodic(Cast("int8"), 4, "full"), 1e9, shared=shared) for shared in (False, True))
    assert shared.step_seconds > apart.step_seconds
