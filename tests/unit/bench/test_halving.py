"""Successive halving on made-up losses: the best is never dropped, and what is trained fits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.tools.bench.race_losses import (
    BASE,
    ENOUGH,
    FEWEST,
    MOST,
    StepsFactor,
    TrainingBudget,
    Trajectory,
    fit,
    halve,
    kept,
)

STEPS = 96
PLAIN = TrainingBudget(STEPS, (1.0,), 3)


def falling(slope, steps=STEPS):
    points = tuple(range(0, steps + 1, 4))
    return Trajectory(points, tuple(4.0 - slope * step for step in points))


class Made:
    """Trajectories of rows that need so many steps for one of DDP's, on every seed; says what was asked for."""

    def __init__(self, needs, best_rate=None):
        self.needs, self.best_rate, self.asked = {BASE: 1.0, **needs}, best_rate or {}, []

    def __call__(self, labels, rate, seed):
        self.asked += [(label, rate, seed) for label in labels if (label, rate, seed) not in self.asked]
        found = {}
        for label in labels:
            factor = self.needs[label][seed] if isinstance(self.needs[label], tuple) else self.needs[label]
            off = 1.0 if rate == self.best_rate.get(label, 1.0) else 0.5
            found[label] = falling(0.01 * off / factor)
        return found


def seconds_of(steps):
    """Of a row whose step takes so long."""
    return lambda label, factor: math.inf if factor.median is None else factor.median * steps[label]


@given(st.lists(st.tuples(st.floats(0.7, 2.0), st.floats(0.1, 1.0)), min_size=1, max_size=9), st.integers(1, 4))
def test_the_best_is_never_dropped_where_every_seed_shows_it(rows, seeds):
    needs = {f"row {i}": factor for i, (factor, _) in enumerate(rows)}
    steps = {f"row {i}": step for i, (_, step) in enumerate(rows)}
    found = halve(Made(needs), list(needs), seconds_of(steps), TrainingBudget(STEPS, (1.0,), seeds))
    assert set(found) == {BASE, *needs}
    best = min(needs, key=lambda label: found[label].median * steps[label])
    assert found[best].median * steps[best] == pytest.approx(min(needs[n] * steps[n] for n in needs), rel=0.02)
    assert len(found[best].factors) == seeds
    assert all(found[label].median == pytest.approx(needs[label], rel=0.02) for label in needs)


def test_every_round_has_one_seed_more_and_the_better_half():
    needs = {f"row {i}": 1.0 + 0.1 * i for i in range(6)}
    made = Made(needs)
    found = halve(made, list(needs), seconds_of(dict.fromkeys(needs, 1.0)), PLAIN)
    trained = {seed: [label for label, _, at in made.asked if at == seed and label != BASE] for seed in range(3)}
    assert [len(trained[seed]) for seed in range(3)] == [6, 3, 2]
    assert trained[2] == ["row 0", "row 1"]
    assert [len(found[f"row {i}"].factors) for i in range(6)] == [3, 3, 2, 1, 1, 1]
    assert found[BASE] == StepsFactor(1.0, (1.0, 1.0, 1.0))
    assert [kept(n) for n in range(7)] == [0, 1, 2, 2, 2, 3, 3]


def test_rates_are_tried_on_seed_0_and_rows_compared_on_others():
    needs, budget = {"a": 1.0, "b": 1.2, "c": 1.4}, TrainingBudget(STEPS, (0.5, 1.0, 2.0), 2)
    made = Made(needs, {"a": 2.0, BASE: 0.5})
    found = halve(made, list(needs), seconds_of(dict.fromkeys(needs, 1.0)), budget)
    assert (found["a"].rate, found["b"].rate, found[BASE].rate) == (2.0, 1.0, 0.5)
    assert [budget.judged_on(round_) for round_ in range(budget.rounds)] == [(0,), (1,), (1, 2)]
    assert [len(found[label].factors) for label in ("a", "b", "c")] == [2, 2, 1]
    assert {(label, rate) for label, rate, seed in made.asked if seed == 2} == {(BASE, 0.5), ("a", 2.0), ("b", 1.0)}


def test_what_does_not_get_there_is_not_trained_again():
    needs = {"never": 50.0, "now and then": (1.0, 50.0, 1.0), "there": 1.3}
    made = Made(needs)
    found = halve(made, list(needs), seconds_of(dict.fromkeys(needs, 1.0)), PLAIN)
    assert (found["never"].median, len(found["never"].factors)) == (None, 1)
    assert found["there"].median == pytest.approx(1.3, rel=0.02)
    assert found["now and then"].factors[1] is None
    assert ("never", 1.0, 1) not in made.asked


def test_it_ends_when_time_is_up():
    needs = {"a": 1.0, "b": 1.2, "c": 1.4}
    asked = []
    made = Made(needs)
    found = halve(made, list(needs), seconds_of(dict.fromkeys(needs, 1.0)), PLAIN,
                  lambda round_, rows: asked.append((round_, list(rows))) or round_ < 2)  # fmt: skip
    assert asked == [(1, ["a", "b"]), (2, ["a", "b"])]
    assert max(seed for _, _, seed in made.asked) == 1
    assert len(found["a"].factors) == 2


def cost(budget, base, others, start):
    """What a race costs if the dearest rows go on."""
    dearest, total, rows = sorted(others, reverse=True), 0.0, len(others)
    for round_ in range(budget.rounds):
        sessions = len(budget.rates)  # in later rounds, at most as many rates serve somebody
        runs = len(budget.rates) if round_ == 0 else 1
        total += sessions * start + runs * budget.steps * (base + sum(dearest[:rows]))
        rows = kept(rows)
    return total


@given(
    st.floats(0.001, 5.0), st.lists(st.floats(0.001, 5.0), max_size=9), st.floats(1.0, 5000.0), st.floats(0.0, 30.0),
    st.one_of(st.none(), st.integers(1, 5)),
)  # fmt: skip
def test_what_is_trained_fits_into_the_seconds(base, others, seconds, start, seeds):
    budget = fit(base, others, seconds, start=start, seeds=seeds)
    if budget is None:
        assert cost(TrainingBudget(FEWEST, (1.0,), seeds or 1), base, others, start) > seconds
    else:
        assert FEWEST <= budget.steps <= MOST
        assert cost(budget, base, others, start) <= seconds
        assert seeds in (None, budget.seeds)
        assert 20 <= budget.steps // budget.every <= 48


def test_more_minutes_are_more_seeds_then_rates_then_steps():
    found = [fit(0.1, [0.1] * 4, seconds, start=5.0) for seconds in (20, 60, 120, 200, 400, 2000)]
    assert found[0] is None
    assert [(b.seeds, len(b.rates)) for b in found[1:]] == [(1, 1), (2, 1), (3, 1), (3, 3), (3, 3)]
    assert all(b.steps >= ENOUGH for b in found[2:])
    assert found[-1].steps == MOST
