"""Whole schedules: the rate that serves each row best, DDP's law, and what a row's final loss is worth in steps."""

import math

import pytest

from thinwire.tools.bench.contenders import share_of_rate
from thinwire.tools.bench.race import RaceSpec
from thinwire.tools.bench.race_losses import (
    BASE,
    HORIZONS,
    UPWARD,
    StepsFactor,
    Trajectory,
    WholeRun,
    best_rate,
    power_of,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.rows import Row, parse_rows


def valley(best):
    return lambda rate: abs(math.log(rate / best, UPWARD))


@pytest.mark.parametrize("steps", [-4, -1, 0, 1, 3, 6])
def test_the_search_goes_to_the_best_rate_and_two_beyond(steps):
    tried = []

    def final(rate):
        tried.append(rate)
        return valley(UPWARD**steps)(rate)

    assert best_rate(final) == pytest.approx(UPWARD**steps)
    assert len(tried) == len(set(tried)) == (steps + 3 if steps > 0 else 5 - steps)


def test_a_rate_that_diverges_is_only_worse():
    assert best_rate(lambda rate: math.inf if rate > 1.5 else -rate) == pytest.approx(UPWARD)


def law(steps, worse=1.0):
    return 5.0 * worse * steps**-0.15


def test_a_final_loss_is_worth_the_steps_in_which_ddp_reaches_it():
    asked = []
    best = {BASE: 1.0, "local": UPWARD, "alone": 1.0}
    needs = {BASE: 1.0, "local": 1.3, "alone": 2.0}

    def run(label, rate, seed, share):
        asked.append((label, share))
        off = 1 + 0.1 * valley(best[label])(rate) + 0.01 * seed
        return Trajectory((0, 1), (9.0, law(1000 * share / needs[label], off)))

    found, power = whole_runs(run, [BASE, "local", "alone"], 3)
    assert power == pytest.approx(0.15)
    assert {share for label, share in asked if label == BASE} == {*HORIZONS, 1.0}
    assert {share for label, share in asked if label != BASE} == {1.0}
    factors = whole_factors(found, power)
    assert factors[BASE] == StepsFactor(1.0, (1.0, 1.0, 1.0))
    assert factors["local"].rate == pytest.approx(UPWARD)
    assert factors["local"].factors == pytest.approx((1.3, 1.3, 1.3))
    assert factors["alone"].median == pytest.approx(2.0)


def test_rates_may_be_given_and_ddp_may_be_known():
    asked = []

    def run(label, rate, seed, share):
        asked.append((label, rate))
        return Trajectory((0, 1), (9.0, law(1000, 1 + 0.1 * valley(UPWARD)(rate))))

    known = WholeRun(0.5, (law(1000),)), 0.15
    found, power = whole_runs(run, ["late"], 1, rates=[1.0, UPWARD], known=known)
    assert (found[BASE], power) == known
    assert set(asked) == {("late", 1.0), ("late", UPWARD)}
    assert whole_factors(found, power)["late"] == StepsFactor(UPWARD, (pytest.approx(1.0),))


def test_a_run_that_fails_has_no_factor():
    def run(label, rate, seed, share):
        return Trajectory((0, 1), (9.0, law(1000 * share))) if label == BASE else Trajectory((), (), "it fails")

    found, power = whole_runs(run, [BASE, "broken"], 1)
    assert whole_factors(found, power)["broken"].median is None


def test_the_power_is_that_of_the_law():
    assert power_of([(n, law(n)) for n in (300, 500, 900)]) == pytest.approx(0.15)


def test_a_schedule_rises_and_falls_to_a_tenth():
    assert share_of_rate(0, 2000) == pytest.approx(0.01)
    assert share_of_rate(99, 2000) == pytest.approx(1, abs=0.01)
    assert share_of_rate(1000, 2000) == pytest.approx(0.55)
    assert share_of_rate(2000, 2000) == pytest.approx(0.1)
    assert share_of_rate(0, 5) == pytest.approx(1.0)


def test_rows_that_everybody_has():
    assert parse_rows("alone,accumulate:every=4,ssgd:look=0.5") == (
        Row("alone", "alone"),
        Row("accumulate every=4", "accumulate", {"every": 4}),
        Row("ssgd look=0.5", "ssgd", {"look": 0.5}),
    )
    for wrong in ("accumulate:every=1", "accumulate:every=2.5", "alone:every=4", "ssgd:look=far"):
        with pytest.raises((ValueError, TypeError)):
            parse_rows(wrong)


def test_a_whole_run_is_not_short():
    with pytest.raises(ValueError, match="--steps 50: a whole run has at least 100 steps"):
        RaceSpec("mlp", (), steps=50)
