"""Workers of different speed, against figures that were worked out by hand."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from thinwire.core.methods.cast import Cast
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Topology
from thinwire.predict.choose import resolved
from thinwire.predict.choose.worth import EXACT, MeasuredWorth, between, shipped, worth_from
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.local_steps import OneWorker, OwnPace, Periodic
from thinwire.systems import parameter_server as ps
from thinwire.tools.lab import parse_rate
from verbs import call

PROFILE = ModelProfile("small", tuple(TensorTime(f"{i}.weight", (256, 128), 0.2) for i in range(3)), 0.4)  # 1 s
TWO_HALVES = (1.0, 1.0, 0.5, 0.5)
INT2 = {"method": "cast", "options": {"dtype": "int2"}, "every": 8, "delay": 0, "elements": 10**5}
ALONE = {"method": "alone", "options": {}, "every": 1, "delay": 0, "elements": 10**5}
RACED = [
    {**INT2, "workers": 2, "factors": [1.0]},
    {**INT2, "workers": 4, "factors": [1.44]},
    {**ALONE, "workers": 2, "factors": [1.8]},
    {**ALONE, "workers": 4, "factors": [3.0]},
]
"""One step of two that train apart is worth 1.8 / 1 of one alone, of four 3 / 1.44."""
OF_THREE = 1.9607  # 1.8 ^ 0.41504 x 2.08333 ^ 0.58496, as 3 is 2 ^ 0.41504 x 4 ^ 0.58496
EXACT_OF_THREE = 2.4268  # 1.8 ^ 0.41504 x 3 ^ 0.58496


def table():
    return worth_from(tuple(MeasuredWorth(**{**row, "factors": tuple(row["factors"])}) for row in RACED))


@pytest.mark.parametrize(
    ("every", "speeds", "made", "stretch"),
    [
        (8, TWO_HALVES, [8, 8, 4, 4], 1.0),
        (8, (1.0, 0.95), [8, 8], 1 / 0.95),  # as many steps, for which the faster waits
        (8, (1.0, 0.3), [8, 2], 1.0),
        (4, (1.0, 0.4), [4, 2], 1.25),  # two steps of 2.5 ticks
        (4, (1.0, 0.1), [4, 1], 2.5),  # one step of ten ticks
    ],
)
def test_steps_of_a_period_and_how_long_it_takes(every, speeds, made, stretch):
    own = OwnPace(Cast("int2"), every, 0, speeds=speeds)
    assert own.made == made
    assert own.stretch == pytest.approx(stretch)


def test_who_waits_for_whom():
    topology, free = Topology(4), Costs.of_link(1e15, 0.0, 4)

    def seconds(method, speeds=TWO_HALVES):
        slowdown = [1 / speed for speed in speeds]
        return simulate(method, PROFILE, topology, free, slowdown=slowdown, shared_compute=False).step_seconds

    codec = Cast("bf16")
    assert seconds(SSGD()) == pytest.approx(2.0, rel=1e-3)
    assert seconds(Periodic(codec, 8, 0)) == pytest.approx(2.0, rel=1e-3)
    assert seconds(OneWorker()) == pytest.approx(1.0)
    assert seconds(OwnPace(codec, 8, 0, speeds=TWO_HALVES)) == pytest.approx(1.0, rel=1e-3)
    slow = (1.0, 1.0, 1.0, 0.1)
    assert seconds(OwnPace(codec, 4, 0, speeds=slow), slow) == pytest.approx(2.5, rel=1e-3)


def test_two_of_half_the_speed_count_as_one():
    worth = between(table())
    own = worth(OwnPace(Cast("int2"), 8, 0, speeds=TWO_HALVES), 10**5, 4)
    assert 3.0 / own.middle == pytest.approx(OF_THREE, rel=1e-4)
    assert own.low < own.middle < own.high
    assert worth(OneWorker(), 10**5, 3).middle == pytest.approx(EXACT_OF_THREE, rel=1e-4)
    assert worth(SSGD(), 10**5, 3).middle == 1.0
    nearly_one = worth(OwnPace(Cast("int2"), 8, 0, speeds=(1.0, 0.01)), 10**5, 2)  # one step in eight: 1.125 workers
    assert 1.8 / nearly_one.middle == pytest.approx(math.exp(math.log2(1.125) * math.log(1.8)))
    assert not worth(OwnPace(Cast("int1"), 8, 0, speeds=TWO_HALVES), 10**5, 4).known


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("method", [SSGD(), Cast("int8"), OneWorker(), Periodic(Cast("int2"), 4, 0)], ids=str)
def test_numbers_that_the_table_knows_and_equal_speeds_change_nothing(method, workers):
    worth = shipped()(method, 10**6, workers)
    assert between(shipped())(method, 10**6, workers) == worth
    if isinstance(method, Periodic):
        own = between(shipped())(OwnPace(method.code, 4, 0, speeds=(1.0,) * workers), 10**6, workers)
        assert own == (worth if workers > 1 else EXACT)


def test_the_delay_and_the_codec_of_own_pace_are_chosen_too():
    topology, costs = Topology(4), Costs.of_link(1e9, 50e-6, 4)
    own = OwnPace(None, 8, "auto", speeds=TWO_HALVES)
    found = resolved(own, PROFILE, topology, costs, worth=between(shipped()), slowdown=[1, 1, 2, 2])
    assert isinstance(found, OwnPace)
    assert (found.every, found.delay, found.speeds) == (8, 0, TWO_HALVES)  # a round of 0.1 MB is not worth a delay
    assert found.codec in (Cast("int4"), Cast("int2"))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The words that are printed and the JSON of a plan by the table above, on a network that takes next to no time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.json").write_text(PROFILE.to_json())
    (tmp_path / "race.json").write_text(json.dumps({"rows": RACED}))

    def asked(*words, methods="local:codec=int2"):
        fixed = ("plan", "small.json", "--worth", "race.json", "--methods", methods, "--link", "100gbit")
        return " ".join(call(*fixed, *words).stdout.split()), json.loads(call(*fixed, *words, "--json").stdout)

    return asked


def rows(ranking):
    return {entry["label"]: (entry["step_seconds"], entry["worth"]) for entry in ranking["entries"]}


def test_two_slow_machines_add_nine_percent(plan):
    text, data = plan("--speeds", "0.5,1,1,0.5")
    found, fast = rows(data["speeds"]["ranking"]), data["speeds"]["fastest"]
    (own,) = (label for label in found if "pace=own" in label)
    assert found[own] == pytest.approx((1.0, OF_THREE), rel=0.01)
    assert found["ssgd"] == pytest.approx((2.0, 3.0 / 2), rel=0.01)
    assert found["local:codec=int2"] == pytest.approx((2.0, 3.0 / 1.44 / 2), rel=0.01)
    assert found["alone"] == pytest.approx((1.0, 1.0))
    assert fast["workers"] == 2
    assert rows(fast["ranking"])["ssgd"] == pytest.approx((1.0, 1.8), rel=0.01)
    assert data["speeds"]["adds"] == pytest.approx(OF_THREE / 1.8 - 1, rel=0.05)
    assert data["question"]["speeds"] == [1.0, 1.0, 0.5, 0.5]
    assert data["ranking"]["answer"] == own
    assert text.startswith("use local codec=int2 pace=own sync_every=")
    assert "4 workers of speeds 1, 1, 0.5, 0.5 reach the loss 1.96 times as soon as one alone (DDP: 1.50)" in text
    assert "the 2 slow machines add 9 % small, 0.1 M parameters, 4 workers" in text
    order = [
        text.index(part) for part in ("at their own pace", "the 2 fastest alone", "in step, exact", "in step, lossy")
    ]
    assert order == sorted(order)
    assert "pace='own', sync_every=" in text
    assert "take the loop's steps from sync.steps(total)" in text


def test_what_they_add_is_to_the_best_of_the_fastest_not_to_the_simplest_that_is_nearly_as_soon():
    found = json.loads(call("plan", "resnet50", "--link", "10gbit", "--speeds", "1,1,0.5,0.5", "--json").stdout)
    fast = found["speeds"]["fastest"]["ranking"]
    worth = {entry["label"]: entry["worth"] for entry in fast["entries"] if entry["worth"]}
    assert worth[fast["answer"]] < max(worth.values())  # a simpler one, within a tenth
    everyone = max(entry["worth"] or 0 for entry in found["speeds"]["ranking"]["entries"])
    assert found["speeds"]["adds"] == pytest.approx(everyone / max(worth.values()) - 1)


def test_one_that_is_far_slower_is_left_out(plan):
    said, data = plan("--speeds", "1,1,1,0.1", "--out", "plan.json")
    assert said.startswith("use ssgd on the 3 fastest alone: they reach the loss 2.4 times as soon as one alone")
    assert "the slow machine adds nothing: leave it out small, 0.1 M" in said
    assert data["ranking"]["workers"] == 3
    assert rows(data["ranking"])["ssgd"][1] == pytest.approx(EXACT_OF_THREE, rel=0.01)
    assert data["speeds"]["ranking"]["workers"] == 4
    assert data["speeds"]["adds"] < 0


def test_what_adds_less_than_a_twentieth_is_left_out(plan):
    _, data = plan("--speeds", "1,1,0.06")
    assert data["speeds"]["adds"] < 0.05
    assert data["speeds"]["answer"].endswith("leave it out")


def test_one_fast_machine_is_held_against_itself(plan):
    said, data = plan("--speeds", "1,0.5")  # 1.5 workers: 1.8 ^ log2(1.5) = 1.41
    assert data["speeds"]["fastest"] is None
    assert data["speeds"]["answer"] == "the slow machine adds 41 %"
    assert said.startswith("use local codec=int2 pace=own ")
    said, data = plan("--speeds", "1,0.5", "--no-lossy")  # in step they are worth 0.9
    assert said.startswith("use one worker alone: 2 workers of speeds 1, 0.5 are worth 0.90 of one here with ")
    assert "the slow machine adds nothing: leave it out" in said
    said, _ = plan("--speeds", "1")
    assert said.startswith("one worker: nothing is sent")


@pytest.mark.parametrize("link", ["1mbit", "10mbit", "100mbit"])
def test_the_row_through_a_server_takes_as_long_as_a_server_in_virtual_time(plan, link):
    said, data = plan("--speeds", "1,1,0.5,0.5", "--link", link)
    (row,), made = data["speeds"]["through a server"], Counter()

    def step_seconds(node, *_):
        made[node] += 1
        return 1 / TWO_HALVES[node]

    wire = ps.Link(50e-6, parse_rate(link))
    trace = ps.simulate(
        ps.presets.local(row["every"], codec="int2"), nodes=4, updates=60, step_seconds=step_seconds,
        link=wire, server_link=wire, payload_bytes=4 * PROFILE.elements,
    )  # fmt: skip
    assert row["step_seconds"] == pytest.approx(trace.seconds / made[0], rel=0.2)
    assert row["bytes_sent"] == pytest.approx(trace.bytes_up / made[0] / 4, rel=0.05)
    assert row["worth"] == pytest.approx(3.0 / row["step_seconds"] / row["steps"])
    assert row["label"] == f"local:sync_every={row['every']}:codec=int2"
    assert "through a server local:codec=int2 /8 " in said


def test_a_server_takes_bits_only_and_merges_nothing_late(plan):
    names = {}
    for codec, word, delay in (("int8", "int8", 0), ("bf16", "bfloat16", 0), ("int2", "int2", 1)):
        new = {"options": {"dtype": word}, "delay": delay}
        race = [row | new if row["method"] == "cast" else row for row in RACED]
        Path("race.json").write_text(json.dumps({"rows": race}))
        _, data = plan("--speeds", "1,1,0.5,0.5", methods=f"local:codec={codec}")
        assert any(entry["steps"] and "pace=own" in entry["label"] for entry in data["speeds"]["ranking"]["entries"])
        names[codec] = [entry["label"] for entry in data["speeds"]["through a server"]]
    assert names == {"int8": ["local:sync_every=8:codec=int8"], "bf16": [], "int2": []}


def test_ranks_of_a_machine_go_or_stay_together(plan):
    _, data = plan("--speeds", "1,1,0.5,0.5", "--ranks-per-node", "2")
    assert data["speeds"]["fastest"]["workers"] == 2
    assert data["speeds"]["answer"] == "the slow machine adds 9 %"


def test_rows_at_their_own_pace_may_be_named_and_equal_machines_have_none(plan):
    label = "local:codec=int2:pace=own:sync_every=8"
    _, data = plan("--speeds", "1,1,0.5,0.5", methods=label)
    assert [name for name in rows(data["speeds"]["ranking"]) if "local" in name] == [label]
    assert plan("--speeds", "1,1,1,1") == plan("--workers", "4")
