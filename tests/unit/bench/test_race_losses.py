"""What a row's steps are worth: the rate that serves it best, DDP's law, what fits, and runs that are kept."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.pricing.profiles import builtin
from thinwire.tools.bench import race_losses
from thinwire.tools.bench.race import RaceSpec
from thinwire.tools.bench.race_losses import (
    BASE,
    ENOUGH,
    FEWEST,
    HORIZONS,
    MOST,
    UPWARD,
    StepsFactor,
    TrainingBudget,
    TrainingSetup,
    Trajectory,
    WholeRun,
    fit,
    power_of,
    trajectories,
    whole_factors,
    whole_runs,
)
from thinwire.tools.bench.row_on_rank import share_of_rate
from thinwire.tools.bench.rows import Row, parse_rows
from thinwire.tools.bench.session import BenchError, Point, RowRecord, RunRecord
from thinwire.tools.bench.words import PACKAGE, is_users


def valley(best):
    return lambda rate: abs(math.log(rate / best, UPWARD))


def law(steps, worse=1.0):
    return 5.0 * worse * steps**-0.15


def trained(loss):
    return Trajectory((0, 1), (9.0, loss))


def test_the_search_goes_to_each_rows_best_rate_and_two_beyond_with_those_that_still_search():
    best = {f"row {steps}": UPWARD**steps for steps in (-4, -1, 0, 1, 3, 6)}
    tried, sessions = {label: [] for label in (BASE, *best)}, []

    def run(labels, rate, seed, share):
        sessions.append(rate)
        for label in labels:
            tried[label].append(rate)
        return {label: trained(1 + valley(best.get(label, 1.0))(rate)) for label in labels}

    found, _ = whole_runs(run, [BASE, *best], 1)
    for label, rate in best.items():
        steps = round(math.log(rate, UPWARD))
        assert found[label].rate == pytest.approx(rate)
        assert len(tried[label]) == len(set(tried[label])) == (steps + 3 if steps > 0 else 5 - steps)
    assert len(sessions) == 1 + 8 + 6 + len(HORIZONS)  # rows share a session as long as they search alike


def test_a_rate_that_diverges_is_only_worse():
    def run(labels, rate, seed, share):
        return {label: trained(math.inf if rate > 1.5 else 5 - rate) for label in labels}

    assert whole_runs(run, [BASE], 1)[0][BASE].rate == pytest.approx(UPWARD)


def test_when_time_is_over_no_other_rate_is_tried():
    tried = []

    def run(labels, rate, seed, share):
        tried.append(rate)
        return {label: trained(5 - rate) for label in labels}

    found, _ = whole_runs(run, [BASE], 1, more=lambda: len(tried) < 3)
    assert found[BASE].rate == max(tried[:3]) == pytest.approx(UPWARD**2)
    assert len(tried) == 3 + len(HORIZONS)


def test_a_final_loss_is_worth_the_steps_in_which_ddp_reaches_it():
    asked = []
    best = {BASE: 1.0, "local": UPWARD, "alone": 1.0}
    needs = {BASE: 1.0, "local": 1.3, "alone": 2.0}

    def run(labels, rate, seed, share):
        asked.extend((label, share) for label in labels)
        off = {label: 1 + 0.1 * valley(best[label])(rate) + 0.01 * seed for label in labels}
        return {label: trained(law(1000 * share / needs[label], off[label])) for label in labels}

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

    def run(labels, rate, seed, share):
        asked.extend((label, rate) for label in labels)
        return {label: trained(law(1000, 1 + 0.1 * valley(UPWARD)(rate))) for label in labels}

    known = WholeRun(0.5, (law(1000),)), 0.15
    found, power = whole_runs(run, ["late"], 1, rates=[1.0, UPWARD], known=known)
    assert (found[BASE], power) == known
    assert asked == [("late", 1.0), ("late", UPWARD)]
    assert whole_factors(found, power)["late"] == StepsFactor(UPWARD, (pytest.approx(1.0),))


def test_a_run_that_fails_has_no_factor():
    def run(labels, rate, seed, share):
        made = {BASE: trained(law(1000 * share)), "broken": Trajectory((), (), "it fails")}
        return {label: made[label] for label in labels}

    found, power = whole_runs(run, [BASE, "broken"], 1)
    assert whole_factors(found, power)["broken"].median is None


@given(
    st.floats(0.001, 5.0), st.lists(st.floats(0.001, 5.0), max_size=9), st.floats(1.0, 50_000.0), st.floats(0.0, 30.0),
    st.one_of(st.none(), st.integers(1, 5)),
)  # fmt: skip
def test_what_is_trained_fits_into_the_seconds(base, others, seconds, start, seeds):
    budget = fit(base, others, seconds, start=start, seeds=seeds)
    if budget is None:
        assert TrainingBudget(FEWEST, seeds or 1, search=False).seconds(base, others, start) > seconds
    else:
        assert FEWEST <= budget.steps <= MOST
        assert budget.seconds(base, others, start) <= seconds
        assert seeds in (None, budget.seeds)


def test_more_minutes_are_rates_then_seeds_then_steps():
    found = [fit(0.1, [0.1] * 4, seconds, start=5.0) for seconds in (60, 300, 800, 1500, 20_000)]
    assert found[0] is None
    assert [(b.seeds, b.search) for b in found[1:]] == [(1, False), (1, True), (3, True), (3, True)]
    assert found[1].steps >= FEWEST
    assert all(b.steps >= ENOUGH for b in found[2:])
    assert found[-1].steps == MOST


def test_the_power_is_that_of_the_law():
    assert power_of([(n, law(n)) for n in (300, 500, 900)]) == pytest.approx(0.15)
    assert power_of([(300, math.inf), *((n, law(n)) for n in (500, 900))]) == pytest.approx(0.15)  # a run that failed
    assert math.isnan(power_of([(300, math.inf), (900, law(900))]))


def test_a_seed_on_which_ddp_failed_says_nothing_of_others():
    finals = {BASE: WholeRun(1.0, (2.0, math.inf, 2.0)), "local": WholeRun(1.0, (2.0, 2.1, math.inf))}
    assert whole_factors(finals, 0.15)["local"].factors == (1.0, None, None)


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


def test_a_run_has_enough_steps_for_a_law():
    with pytest.raises(ValueError, match="--steps 50: a run has at least 100 steps"):
        RaceSpec("mlp", (), steps=50)


def test_a_seed_that_does_not_get_there_counts():
    assert StepsFactor(1.0, (1.2, None, 1.4)).median == 1.4
    assert StepsFactor(1.0, (1.2, None, 1.4)).ends == (1.2, None)
    assert StepsFactor(1.0, (1.2, None, None)).median is None


def test_trajectories_are_trained_once(tmp_path, monkeypatch):
    """What is kept is what they follow from: another row, seed, rate or text of the programs is trained."""
    asked = []

    def session(spec, launch, on_progress):
        asked.append((spec.model, spec.seed, [row.label for row in spec.rows]))
        rows = [RowRecord("compute", "compute")]
        for row in spec.rows:
            curve = [Point(0, 0.0, float("nan"), 4.0), Point(8, 1.0, 3.1, 3.0)]
            rows.append(RowRecord(row.label, row.kind, curve=curve, error="it broke" if row.label == "acp" else ""))
        return RunRecord("a model", 1, 1, 4, 2, None, rows), None

    monkeypatch.setattr(race_losses, "run_session", session)
    track, rows = TrainingSetup("mlp", steps=8), parse_rows("ddp,ssgd,acp")
    found = trajectories(track, rows, 2.0, 5, None, folder=tmp_path)
    assert list(found) == ["ddp", "ssgd", "acp"]
    assert found["ddp"] == Trajectory((0, 8), (4.0, 3.0))
    assert found["acp"].error == "it broke"
    assert asked == [("mlp:lr=0.002", 5, ["ddp", "ssgd", "acp"])]
    assert trajectories(track, rows, 2.0, 5, None, folder=tmp_path) == found
    assert asked[1:] == [("mlp:lr=0.002", 5, ["acp"])]  # what failed is tried again
    trajectories(track, rows[:1], 2.0, 6, None, folder=tmp_path)
    trajectories(track, rows[:1], 1.0, 5, None, folder=tmp_path)
    trajectories(TrainingSetup("mlp", steps=8, workers=3), rows[:1], 2.0, 5, None, folder=tmp_path)
    monkeypatch.setattr(race_losses, "text_digest", lambda: "another")
    trajectories(track, rows[:1], 2.0, 5, None, folder=tmp_path)
    assert len(asked) == 6
    assert json.loads(next(iter(tmp_path.iterdir())).read_text())["steps"] == [0, 8]


def test_any_change_of_the_package_or_of_torch_trains_and_times_anew(tmp_path):
    def digest(torch="2.13.0"):
        return race_losses.package_digest(tmp_path, torch)

    for name in ("engine/local/sync.py", "planner/steps.json", "engine/__pycache__/local_sync.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    before = digest()
    assert digest() == before != digest("2.14.0")
    (tmp_path / "engine/__pycache__/local_sync.pyc").write_text("compiled by another Python")
    assert digest() == before
    seen = {before}
    for name in ("engine/local/sync.py", "planner/steps.json"):
        (tmp_path / name).write_text("two")
        seen.add(digest())
    (tmp_path / "engine/local/sync.py").rename(tmp_path / "engine/other.py")
    seen.add(digest())
    assert len(seen) == 4


def test_what_was_trained_before_the_ranks_ended_is_kept(tmp_path, monkeypatch):
    asked = []

    def session(spec, launch, on_progress):
        asked.append([row.label for row in spec.rows])
        for row in spec.rows[:2]:
            on_progress({"trained": {"label": row.label, "kind": row.kind, "curve": [asdict(Point(8, 1.0, 3.1, 3.0))]}})
        raise BenchError("the ranks ended with exit code 1")

    monkeypatch.setattr(race_losses, "run_session", session)
    for _ in range(2):
        with pytest.raises(BenchError):
            trajectories(
                TrainingSetup("mlp", steps=8), parse_rows("ddp,ssgd,acp,powersgd"), 1.0, 0, None, folder=tmp_path
            )
    assert asked == [["ddp", "ssgd", "acp", "powersgd"], ["acp", "powersgd"]]


def test_a_change_of_any_wing_counts_and_an_error_of_any_is_not_the_users():
    assert {"tools", "core", "engine"} <= {path.name for path in PACKAGE.iterdir()}
    with pytest.raises(ValueError) as caught:
        builtin("nothing")
    assert not is_users(caught.value.with_traceback(caught.tb.tb_next))
