"""Schedules against brute force, fits against what they were made from, and both under a clock."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.federated import Speed, predict
from thinwire.systems.federated import schedule as s
from thinwire.systems.federated.coordinator import Coordinator, DeviceLost, drive
from thinwire.systems.federated.schedule import ClientTime, Fit, Planner, fit

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=7)
FITS = st.lists(st.builds(Fit, st.floats(0.1, 4.0), st.floats(0.0, 3.0)), min_size=1, max_size=3)


def best(sizes, fits):
    """The shortest makespan of all assignments."""
    ends = []
    for owners in itertools.product(range(len(fits)), repeat=len(sizes)):
        lists = [[i for i, o in enumerate(owners) if o == d] for d in range(len(fits))]
        ends.append(s.makespan(lists, sizes, fits))
    return min(ends)


@given(SIZES, FITS)
@settings(max_examples=150, deadline=None)
def test_lpt_is_a_complete_assignment_and_never_better_than_the_best(sizes, fits):
    found = s.lpt(sizes, fits)
    assert sorted(i for mine in found.lists for i in mine) == list(range(len(sizes)))
    assert found.predicted_seconds == pytest.approx(s.makespan(found.lists, sizes, fits))
    least = best(sizes, fits)
    assert found.predicted_seconds >= least - 1e-9
    assert s.lower_bound(sizes, fits) <= least + 1e-9


@given(SIZES, st.integers(1, 3), st.floats(0.1, 4.0))
@settings(max_examples=100, deadline=None)
def test_on_identical_devices_lpt_keeps_grahams_bound(sizes, devices, slope):
    fits = [Fit(slope, 0.0)] * devices
    assert s.lpt(sizes, fits).predicted_seconds <= best(sizes, fits) * (4 / 3 - 1 / (3 * devices)) + 1e-9


@given(SIZES, st.integers(1, 4), st.sampled_from(["equal", "lpt", "pull"]))
def test_assignments_survive_the_wire(sizes, devices, name):
    made = s.plan(name, sizes, None, devices, seed=1)
    found = s.Assignment.from_json(made.to_json())
    assert (found.lists, found.queue) == (made.lists, made.queue)


def test_equal_depends_on_the_seed_and_not_on_sizes():
    one, two = s.equal([1] * 20, 4, 1), s.equal([9] * 20, 4, 1)
    assert one == two != s.equal([1] * 20, 4, 2)
    assert {len(mine) for mine in one.lists} == {5}


def test_what_auto_means():
    rule = {"warmup_rounds": 2, "devices": 4}
    assert s.chosen("auto", round=1, clients=100, **rule) == "equal"
    assert s.chosen("auto", round=2, clients=32, **rule) == "pull"
    assert s.chosen("auto", round=2, clients=31, **rule) == "lpt"
    assert s.chosen("pull", round=0, clients=4, **rule) == "pull"
    assert s.chosen("auto", round=9, clients=100, warmup_rounds=2, devices=1) == "equal"


# Fits


@given(st.floats(1e-6, 10), st.floats(0, 10), st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True))
def test_a_line_without_noise_is_found(a, b, sizes):
    found = fit(sizes, [a * n + b for n in sizes])
    assert found.a == pytest.approx(a, rel=1e-4, abs=1e-8)
    assert found.b == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_degenerate_data():
    """T4: no records, one size, a falling line: a fit comes out, positive."""
    assert fit([4, 4], [2.0, 4.0]) == Fit(0.75, 0.0)  # one size
    falling = fit([1, 2, 3], [3.0, 2.0, 1.0])
    assert falling.a > 0
    assert falling.b == pytest.approx(2.0)
    assert fit([1, 10], [0.5, 10.0]) == Fit(10.5 / 11, 0.0)  # a negative intercept
    with pytest.raises(ValueError, match="at least one record"):
        fit([], [])
    planner = Planner("lpt", 3, 0)
    assert planner.fits("train") == [Fit(1.0, 0.0)] * 3
    planner.learn("train", [ClientTime(0, 7, 10, 5.0), ClientTime(2, 8, 10, 15.0)])
    one, two, three = planner.fits("train")
    assert (one.a, two.a, three.a) == (0.5, 1.0, 1.5)  # the device without records gets the mean
    assert planner.fits("gradient") == [Fit(1.0, 0.0)] * 3  # other visits, other fits


def test_the_window_is_of_rounds():
    """T2: a client drawn long ago does not hold the fit back."""
    planner = Planner("lpt", 1, 0)
    for round in range(10):
        slope = 1.0 if round < 5 else 4.0
        planner.learn("train", [ClientTime(0, round, n, slope * n) for n in (5, 10)])
    assert planner.fits("train")[0].a == pytest.approx(4.0)


# Under a clock

FAST, SLOW = Speed(1.0), Speed(4.0)


def sizes_of(client):
    return 1 + int(np.random.default_rng(client).lognormal(2, 0.8))


def median_ratio(name, speeds, clients_per_round, **options):
    found = predict(name, 500, sizes_of, speeds, rounds=10, clients_per_round=clients_per_round, **options)
    return statistics.median(t / b for t, b in zip(found.round_seconds[3:], found.bound_seconds[3:]))


def test_uneven_devices():
    """B9: with 12 clients a device pull is at most 1.1 times lpt, and both beat equal parts."""
    speeds = [FAST] * 4 + [SLOW] * 4
    pull, lpt, equal = (median_ratio(name, speeds, 96) for name in ("pull", "lpt", "equal"))
    assert pull <= 1.1 * lpt
    assert max(pull, lpt) * 1.5 < equal
    assert min(pull, lpt) >= 1 - 1e-9


@pytest.mark.parametrize("name", ["lpt", "equal", "pull"])
def test_a_lost_devices_clients_are_trained_once_more_and_reported_once(name):
    plan = s.plan(name, [3, 2, 2, 1], [Fit(1.0, 0.0)] * 2, 2, seed=0)
    coordinator = Coordinator(4, plan, range(2))
    forgotten, reports = [], []
    outcome = drive(
        coordinator,
        2,
        lambda d, i, _: 1.0,
        losses={1: 1.5},
        on_lost=lambda device, held: forgotten.append((device, tuple(held))),
        on_report=reports.append,
    )
    assert sorted(coordinator.reported) == [0, 1, 2, 3]
    assert coordinator.lost_devices == [1]
    assert len(forgotten) == 1
    assert forgotten[0][1]
    assert set(reports) == {0}
    assert outcome.seconds > 2.0


def test_the_last_device():
    plan = s.plan("pull", [1, 1], None, 1, seed=0)
    with pytest.raises(DeviceLost, match="the last one; 2 clients are left"):
        drive(Coordinator(2, plan, range(1)), 1, lambda d, i, _: 1.0, losses={0: 0.5})


def test_the_late_result_of_a_lost_device_is_refused():
    """T6: its clients are another's by then."""
    coordinator = Coordinator(2, s.plan("lpt", [1, 1], [Fit(1.0, 0.0)] * 2, 2, 0), range(2))
    assert len(coordinator.start()) == 2
    assert coordinator.result(0) == []
    (again,) = coordinator.lost(1)
    assert (again.device, len(again.clients)) == (0, 1)
    with pytest.raises(DeviceLost, match="was declared lost"):
        coordinator.result(1)
    assert coordinator.ask(0).ends
    coordinator.result(0)
    assert coordinator.done


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: s.plan("greedy", [1], None, 1, 0), "'greedy' is unknown; use one of auto"),
        (lambda: s.plan("lpt", [1], None, 0, 0), "devices=0"),
        (lambda: Speed(-1.0), "seconds of at least 0"),
        (
            lambda: predict("lpt", 3, sizes_of, [FAST], rounds=1, clients_per_round=4),
            "clients_per_round=4 must be between 1",
        ),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
