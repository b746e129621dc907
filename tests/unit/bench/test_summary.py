import io
import json
import math
import random
import statistics
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from thinwire.core.methods.cast import Cast
from thinwire.predict.choose.worth import shipped
from thinwire.predict.timeline.local_steps import OneWorker, Periodic
from thinwire.tools.bench.demo import conclusion, judge_demo
from thinwire.tools.bench.rows import Row, parse_rows
from thinwire.tools.bench.session import BenchSpec, Point, RowRecord, RunRecord, seconds_to
from thinwire.tools.bench.summary import bench_picture, bench_table, chosen_elsewhere, families, summarise


def row(label, seconds, kind="ddp", **more):
    times = [seconds - 0.1, seconds, seconds + 0.1]
    usual = {"forward_seconds": [0.3] * 3, "host_seconds": [0.01] * 3, "losses": [3.0, 2.0, 1.0], "wire_bytes": 8e6}
    return RowRecord(label, kind, step_seconds=times, wire_source="interface", **{**usual, **more})


def record(*rows):
    return RunRecord("a model", 1_000_000, 10, 4_000_000, 2, "eth0", [row("compute", 1.0, "compute"), *rows])


def shown(result):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(bench_table(result))
    return console.export_text()


SPEC = BenchSpec("mlp", (Row("ddp", "ddp"),), link="10mbit", link_bits=10**7)


def test_figures_families_failures_and_their_table(tmp_path):
    failed = RowRecord("acp", "acp", error="rank 1: ValueError: no")
    rows = [row("ddp", 4.0), row("b (1 MB)", 3.0, family="b"), row("b (4 MB)", 2.0, family="b"), failed]
    result = summarise(SPEC, record(*rows), emulated=True, note="")
    assert [r.label for r in result.rows] == ["compute", "ddp", "b (4 MB)", "acp"]
    best = result.row("b")
    assert (best.step_seconds, best.exposed_seconds, best.speedup) == pytest.approx((2.0, 1.0, 2.0))
    assert best.spread_seconds == pytest.approx(0.1)
    assert best.loss == 2.0
    assert set(best.variants) == {"b (1 MB)", "b (4 MB)"}
    assert result.floor_seconds == pytest.approx(3.5)
    text = shown(result)
    for wanted in ("failed: rank 1: ValueError: no", "floor", "3.50 s", "2.00", "tried: b (1 MB) 3.00 s"):
        assert wanted in text
    shape = json.loads(json.dumps(asdict(result)))
    assert {"floor_seconds", "compute_seconds", "emulated", "rows"} <= set(shape)
    (panel,) = bench_picture(result).panels
    assert panel.x_names == ("compute", "ddp", "b (4 MB)")
    assert [line.y for line in panel.lines] == [(1.0, 1.0, 1.0), (0.0, 3.0, 1.0)]


def test_worth_is_steps_of_one_alone_over_those_of_all():
    """By the table in the package: two workers of DDP need fewer steps than one, local steps a few more than DDP."""
    rows = {
        name: row(name, 2.0, name.split()[0], plan=plan)
        for name, plan in (
            ("alone", ""),
            ("ddp", ""),
            ("acp rank=3", ""),
            ("local sync_every=4", ""),
            ("local", '{"sync_every": 4, "fragment_sync_delay": 0, "codec": "int2"}'),
        )
    }
    rows["local unmeasured"] = replace(rows["local"], label="local codec=auto", plan="")
    asked = parse_rows("alone,ddp,acp:rank=3,local:sync_every=4,local,local:codec=auto")
    found = summarise(replace(SPEC, rows=asked), record(*rows.values()), emulated=True, note="")
    worth = {one.label: one.worth for one in found.rows}
    assert (worth["compute"], worth["alone"]) == (1.0, 0.5)  # a step of 1 s, and of 2 s
    steps = shipped()(OneWorker(), 1_000_000, 2).middle
    assert worth["ddp"] == pytest.approx(steps / 2)
    period = Periodic(Cast("int2"), 4, 0)
    assert worth["local"] == pytest.approx(steps / 2 / shipped()(period, 1_000_000, 2).middle)
    assert 0.5 < worth["local"] < worth["ddp"]
    assert worth["acp rank=3"] is worth["local codec=auto"] is None  # never measured; without a period yet
    assert "worth: how many times as soon 2 workers reach a loss as one alone" in shown(found)


def test_the_table_says_what_auto_took():
    auto = row("auto lossy=True", 2.0, "auto", why=["auto: cast, dtype=int4: 5 buckets, 2 s predicted", "and more"])
    local = row("ssgd fusion=optimal", 2.0, "ssgd", why=["ssgd: 3 buckets from measured times"])
    result = summarise(SPEC, record(row("ddp", 4.0), auto, local), emulated=True, note="")
    text = shown(result)
    assert "auto lossy=True: cast, dtype=int4: 5 buckets, 2 s predicted\n" in text
    assert "measured times" not in text
    assert result.row("ssgd").why == ("ssgd: 3 buckets from measured times",)


def test_a_link_that_was_not_emulated_is_said_in_the_table():
    text = shown(summarise(SPEC, record(row("ddp", 4.0)), emulated=False, note="no rights here"))
    assert "NOT emulated" in text
    assert "no rights here" in text


def test_when_a_curve_reaches_a_loss():
    curve = [
        Point(0, 0.0, math.nan, 5.0),
        Point(5, 10.0, 4.0, 3.0),
        Point(10, 14.0, 2.0, 3.5),
        Point(15, 20.0, 1.0, 1.0),
    ]
    assert seconds_to(curve, 3.0) == pytest.approx(10.0)
    assert seconds_to(curve, 4.0) == pytest.approx(5.0)
    assert seconds_to(curve, 2.0) == pytest.approx(14.0 + 6.0 * 1.5 / 2.5)
    assert seconds_to(curve, 6.0) == 0.0
    assert seconds_to(curve, 0.5) is None
    assert seconds_to([Point(0, 0.0, math.nan), Point(5, 1.0, 3.0)], 4.0) == 1.0


def test_the_demo_predicts_only_what_it_could_not_measure():
    curve = [Point(0, 0.0, 5.0, 5.0), Point(3, 12.0, 4.0, 4.0)]
    whole = record(row("ddp", 4.0, curve=curve))
    measured = judge_demo(SPEC, whole, emulated=True, note="").rows[0]
    predicted = judge_demo(SPEC, whole, emulated=False, note="").rows[0]
    assert measured.predicted_seconds is None
    assert (measured.steps, measured.seconds) == (3.0, 12.0)
    assert predicted.predicted_seconds == pytest.approx(0.3 + 8e6 * 8 / 1e7)
    assert predicted.seconds == pytest.approx(3 * predicted.predicted_seconds)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0, 2.0], ["The same loss (3.000) in 4.5 s instead of 12.0 s: 2.7 times faster.", "tw.attach(model"]),
        ([4.0, 3.05, 3.02, 2.9], ["9.5 s instead of 12.0 s: 1.3 times faster.", "tw.attach(model"]),
        ([4.0, 3.1, 3.01, 3.005, 2.9], ["took 12.1 s, and DDP 12.0 s.", "no gain over DDP"]),
        ([4.0, 3.5, 3.4, 3.3], ["No row reached DDP's loss (3.000) in the 12.0 s", "no gain over DDP"]),
    ],
)
def test_the_demo_recommends_what_won_and_nothing_else(losses, said):
    curve = [Point(3 * i, 3.0 * i, x, x) for i, x in enumerate([5.0, *losses])]
    rows = [
        row("ddp", 4.0, curve=[Point(0, 0.0, 5.0, 5.0), Point(3, 12.0, 3.0, 3.0)]),
        row("thinwire local", 1.0, "local", curve=curve),
    ]
    result = judge_demo(SPEC, record(*rows), emulated=True, note="")
    words = "\n".join(conclusion(result))
    for one in said:
        assert one in words
    assert ('tw.attach(model, optimizer, "local")' in words) == ("tw.attach(model" in said)


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
    failed = RowRecord("a", "ddp", family="f", step_seconds=[1.0] * 4, error="no")
    ((best, times),) = families([failed, RowRecord("b", "ddp", family="f", step_seconds=[2.0] * 4)], 2)
    assert (best.label, times) == ("b", {"b": 2.0})
    ((best, times),) = families([failed], 2)
    assert (best.error, times) == ("no", {})
