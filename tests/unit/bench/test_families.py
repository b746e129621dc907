"""The best of several: chosen by other steps than those that are counted."""

import random
import statistics

from thinwire.tools.bench.session import RowRecord
from thinwire.tools.bench.summary import chosen_elsewhere, families


def test_each_round_counts_who_was_fastest_in_the_others():
    seconds = {"a": [1.0, 1.0, 6.0, 6.0, 1.0, 1.0], "b": [3.0, 3.0, 2.0, 2.0, 3.0, 3.0]}
    assert chosen_elsewhere(seconds, 3) == [3.0, 3.0, 6.0, 6.0, 3.0, 3.0]  # a: 3.5, 1, 3.5 elsewhere; b: 2.5, 3, 2.5


def test_equal_variants_take_what_each_of_them_takes():
    draw = random.Random(0)
    least, counted = [], []
    for _ in range(200):
        seconds = {name: [1 + draw.gauss(0, 0.1) for _ in range(5)] for name in "abcd"}
        least.append(min(map(statistics.median, seconds.values())))
        counted.append(statistics.median(chosen_elsewhere(seconds, 5)))
    assert statistics.fmean(least) < 0.97
    assert abs(statistics.fmean(counted) - 1) < 0.01


def test_one_clearly_best_variant_is_counted_as_it_is():
    rows = [RowRecord(f"x {i}", "ddp", family="x", step_seconds=[i + 0.1 * k for k in range(6)]) for i in (3, 1, 2)]
    ((best, times),) = families(rows, 3)
    assert best.label == "x 1"
    assert best.step_seconds == rows[1].step_seconds
    assert sorted(times) == ["x 1", "x 2", "x 3"]


def test_what_cannot_be_chosen_elsewhere_is_the_least_median():
    for seconds, rounds in (({"a": [2.0, 2.0], "b": [1.0, 1.0]}, 1), ({"a": [2.0, 2.0], "b": [1.0]}, 2)):
        assert chosen_elsewhere(seconds, rounds) == []
        rows = [RowRecord(label, "ddp", family="f", step_seconds=s) for label, s in seconds.items()]
        ((best, _),) = families(rows, rounds)
        assert (best.label, best.step_seconds) == ("b", seconds["b"])


def test_failed_variants_do_not_count():
    rows = [RowRecord("a", "ddp", family="f", step_seconds=[1.0] * 4, error="no"), RowRecord("b", "ddp", family="f")]
    rows[1].step_seconds = [2.0] * 4
    ((best, times),) = families(rows, 2)
    assert best.label == "b"
    assert times == {"b": 2.0}
    ((failed, times),) = families(rows[:1], 2)
    assert (failed.error, times) == ("no", {})
