"""What a step is worth: steps to a loss, rates tuned alike, and trajectories that are kept."""

import json
from dataclasses import asdict

import pytest

from thinwire.core.pricing.profiles import builtin
from thinwire.tools.bench import race_losses
from thinwire.tools.bench.race_losses import StepsFactor, TrainingSetup, Trajectory, steps_factors, trajectories
from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchError, Point, RowRecord, RunRecord
from thinwire.tools.bench.words import PACKAGE, is_users


def test_smoothing_leaves_what_is_straight_and_takes_out_what_leaps():
    line = Trajectory(tuple(range(7)), (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0))
    assert line.smoothed(2) == line
    leaping = Trajectory(tuple(range(7)), (7.0, 6.0, 5.0, 9.0, 3.0, 2.0, 1.0))
    assert leaping.smoothed(2).losses == pytest.approx((7.0, 6.0, 20 / 3, 5.0, 4.0, 2.0, 1.0))


def test_the_loss_before_the_first_step_counts_in_no_other_mean():
    """Two rows on one curve, whose points lie a step apart: one's third point would reach back to the start."""
    curves = [Trajectory(steps, tuple(50.0 if s == 0 else 4 - s / 100 for s in steps))
              for steps in ((0, 19, 38, 57, 76), (0, 20, 39, 58, 77))]  # fmt: skip
    for curve in curves:
        assert curve.smoothed(38).losses == pytest.approx(curve.losses)


def test_who_is_judged_seldom_is_not_smoothed_wider():
    """A curve that falls ever more slowly, by points 8 and 32 steps apart: the same losses, the same steps to one."""

    def run(labels, rate, seed):
        steps = {"ddp": range(0, 400, 8), "seldom": range(0, 400, 32)}
        return {label: Trajectory(tuple(steps[label]), tuple(100 / (50 + s) for s in steps[label])) for label in labels}

    found = steps_factors(run, ["ddp", "seldom"], "ddp", 0.6, reach=16, rates=(1.0,))
    assert found["seldom"].factors == pytest.approx((1.0,) * 3, abs=0.01)


def test_a_row_that_trains_longer_does_not_move_the_target():
    """DDP's loss after 60 of its 100 steps, though another, always ten steps behind, ends after 140."""

    def run(labels, rate, seed):
        ends, behind = {"ddp": 101, "late": 141}, {"ddp": 0, "late": 10}
        steps = {label: tuple(range(0, ends[label], 10)) for label in labels}
        return {
            label: Trajectory(steps[label], tuple(200.0 - s + behind[label] for s in steps[label])) for label in labels
        }

    found = steps_factors(run, ["ddp", "late"], "ddp", 0.6, reach=0, rates=(1.0,))
    assert found["late"].median == pytest.approx(70 / 60)


def falling(slope, start=4.0, steps=100):
    return Trajectory(tuple(range(0, steps + 1, 10)), tuple(start - slope * step for step in range(0, steps + 1, 10)))


def test_rows_are_tuned_alike_and_compared_on_other_seeds():
    """DDP learns fastest at twice the rate, the other at the usual one, and needs 1.25 as many steps then."""
    asked = []

    def run(labels, rate, seed):
        asked.append((tuple(labels), rate, seed))
        slopes = {"ddp": {1.0: 0.01, 2.0: 0.02, 4.0: 0.005}[rate], "other": {1.0: 0.016, 2.0: 0.01, 4.0: 0.001}[rate],
                  "never": 0.0}  # fmt: skip
        return {label: falling(slopes[label], start=4.0 + seed) for label in labels}

    found = steps_factors(run, ["ddp", "other", "never"], "ddp", 0.4, reach=20, rates=(1.0, 2.0, 4.0))
    assert found["ddp"] == StepsFactor(2.0, (1.0, 1.0, 1.0))
    assert found["other"].rate == 1.0
    assert found["other"].factors == pytest.approx((1.25, 1.25, 1.25))
    assert (found["never"].median, found["never"].ends) == (None, (None, None))
    assert asked[:3] == [(("ddp", "other", "never"), rate, 0) for rate in (1.0, 2.0, 4.0)]
    assert sorted(asked[3:5]) == [(("ddp",), 2.0, 1), (("other", "never"), 1.0, 1)]  # no rate that serves nobody


def test_a_rate_that_one_seed_bears_by_luck_is_not_taken():
    """At the larger rate seed 0 learns faster, the two others slower."""

    def run(labels, rate, seed):
        return {label: falling({1.0: 0.01, 2.0: 0.012 if seed == 0 else 0.004}[rate]) for label in labels}

    by_one = steps_factors(run, ["ddp", "other"], "ddp", 0.4, reach=20, rates=(1.0, 2.0))
    by_three = steps_factors(run, ["ddp", "other"], "ddp", 0.4, reach=20, rates=(1.0, 2.0), tuned_on=(0, 1, 2))
    assert {one.rate for one in by_one.values()} == {2.0}
    assert {one.rate for one in by_three.values()} == {1.0}


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
