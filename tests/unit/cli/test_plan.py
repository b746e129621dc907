import json
import math
import re

import pytest
import torch

import thinwire.predict.measure as measure
from thinwire.adapters.ddp_buckets import bucket_arguments, has_bucket_list
from thinwire.core.pricing.costs import Costs, Linear
from thinwire.core.pricing.profiles import ModelProfile, TensorTime, builtin
from thinwire.core.program import Plan
from thinwire.predict.choose import Map
from thinwire.predict.choose.rank import PAYS
from thinwire.predict.measure import machine
from thinwire.predict.timeline.local_steps import PLAIN
from thinwire.tools.cli import plan_inputs
from thinwire.tools.cli.options import PlanOptions
from thinwire.tools.cli.plan_answer import FASTER, ddp_sentence
from thinwire.tools.cli.plan_inputs import read_methods
from thinwire.tools.lab import format_rate, parse_rate
from verbs import call

CANDIDATES = {
    "ssgd", "cast:dtype=bf16", "cast:dtype=int8", "cast:dtype=int4", "signsgd", "onebit", "qsgd", "terngrad",
    "topk:density=0.01", "topk:density=0.001", "gtopk:density=0.01", "oktopk:density=0.01", "dgc", "powersgd:rank=4",
    "acp:rank=4", "acp:rank=32", "dear", "lags", "local", "local:codec=none", "diloco",
}  # fmt: skip
FEW = ("--methods", "cast:dtype=bf16,acp:rank=4,topk:density=0.01")  # where it does not matter which: all take seconds


def run(*words):
    return call("plan", *words).stdout


def assert_fits(text):
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS} " not in text  # no cell was cut


def as_json(*words):
    return json.loads(run(*words, "--json"))


def test_the_table_and_the_sentences():
    table = run("bert-large")  # whose names and numbers are the longest
    assert_fits(table)
    text = " ".join(table.split())
    for label in CANDIDATES:
        assert label in text
    for words in ("exact", "lossy", "band", "exposed", "bound by", "is faster here:", "80 % efficien"):
        assert words in text
    assert "measured here: 0% of the predicted step" in text
    assert "62.4 TFLOP/s" in text
    assert "tw.attach(model, optimizer, " in text


def test_a_narrow_screen_loses_no_column():
    words = ("plan", "resnet50", "--methods", "acp:rank=4")
    wide, narrow = (call(*words, env={"COLUMNS": columns}).stdout for columns in ("200", "40"))
    for head in ("band", "exposed", "bound by", "steps"):
        assert f"  {head}" in narrow
    assert max(len(line) for line in narrow.splitlines()) <= 40
    (row,) = (line.split() for line in wide.splitlines() if line.strip().startswith("acp:rank=4 "))
    assert [line.split(": ")[1] for line in narrow.partition("\nacp:rank=4\n")[2].splitlines()[: len(row) - 1]] == row[
        1:
    ]


def test_the_cluster():
    found = as_json("vgg16", "--link", "1gbit", "--delay", "1ms", "--workers", "8", "--ranks-per-node", "4", *FEW)
    asked = found["question"]
    assert (asked["bits_per_second"], asked["latency_seconds"], asked["delay_seconds"]) == (1e9, 5e-5, 1e-3 - 5e-5)
    assert (asked["workers"], asked["ranks_per_node"]) == (8, 4)
    assert (asked["device"], asked["backend"], asked["network"]) == ("a100", "nccl", "assumed")
    assert found["ranking"]["workers"] == 8
    assert found["knee"][found["ranking"]["best_exact"]] in (None, 8, 16)


def test_methods():
    found = as_json("resnet50", "--methods", "thinwire acp:rank=8,topk:density=0.05")
    labels = {entry["label"]: entry for entry in found["ranking"]["entries"]}
    assert set(labels) == {"ssgd", "cast:dtype=bf16", "acp:rank=8", "topk:density=0.05", *PLAIN}
    assert labels["acp:rank=8"]["options"]["rank"] == 8
    candidates, named = read_methods(None)
    assert {label for label, _ in candidates} == CANDIDATES
    assert named == ()


def test_batch_size_and_device():
    small, large = (as_json("resnet50", "--batch-size", n, *FEW)["ranking"]["entries"][0] for n in (8, 256))
    assert small["step_seconds"] < large["step_seconds"]
    slow, fast = (as_json("resnet50", "--device-flops", f, *FEW)["ranking"]["entries"][0] for f in ("1e12", "1e14"))
    assert slow["step_seconds"] > fast["step_seconds"]
    cpu = as_json("resnet50", "--device", "CPU", *FEW)
    assert cpu["question"]["backend"] == "gloo"


def test_no_lossy():
    found = as_json("resnet50", "--link", "100mbit", "--no-lossy", *FEW)["ranking"]
    assert found["best"] == found["best_exact"] == "ssgd"
    assert {e["label"] for e in found["entries"] if not e["exact"]} == {"cast:dtype=bf16", *PLAIN}


def test_a_race_says_what_steps_are_worth(tmp_path):
    raced = {"method": "acp", "options": {"rank": 4}, "every": 1, "delay": 0, "elements": 1, "workers": 4,
             "factors": [1.0, 1.5, 3.0]}  # fmt: skip
    (tmp_path / "race.json").write_text(json.dumps({"rows": [raced]}))
    answer = as_json("resnet50", "--link", "1gbit", "--worth", "race.json", "--methods", "acp:rank=4,powersgd:rank=4")
    steps = {entry["label"]: (entry["steps"], entry["most_steps"]) for entry in answer["ranking"]["entries"]}
    assert steps["acp:rank=4"] == (1.5, 3.0)
    assert steps["powersgd:rank=4"] == (None, None)
    assert answer["ranking"]["best"] == "acp:rank=4"
    said = " ".join(run("resnet50", "--link", "1gbit", "--worth", "race.json", "--methods", "acp:rank=4").split())
    assert "relative to exact averaging: your race with 1e-06 M parameters, 4 workers predicted: ssgd falls" in said
    assert "thinwire race" not in said
    assert "race it" not in said


def test_explain():
    text = run("bert-base", "--explain", "--methods", "topk:density=0.01,acp:rank=4")
    assert_fits(text)
    assert "topk:density=0.01: 17 buckets" in text
    assert "density" in text
    assert "phase" in text
    found = as_json("resnet50", "--explain")
    assert set(found["explain"]) == {found["ranking"]["best"], found["ranking"]["best_exact"]}
    group = found["explain"]["ssgd"][0]
    assert group["names"][0] == "fc.bias"
    assert group["kept"] is group["density"] is None


def test_map(monkeypatch):
    monkeypatch.setattr("thinwire.predict.choose.grid.WORKERS", (2, 16))
    text = run("resnet50", "--map", "--methods", "cast:dtype=int4")
    assert_fits(text)
    assert "100gbit" in text
    assert "cast int4" in text
    found = as_json("resnet50", "--map", "--methods", "acp:rank=4", "--workers", "8", "--ranks-per-node", "8")
    again = Map.from_json(json.dumps(found["map"]))
    assert again.workers == (16, 128)
    assert len(again.cells) == len(again.bits_per_second)


def test_files(tmp_path):
    answer = as_json("resnet50", "--no-lossy", "--link", "100gbit", "--trace", "trace.json", "--out", "plan.json", *FEW)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event["name"].startswith("forward") for event in trace["traceEvents"])
    text = (tmp_path / "plan.json").read_text()
    plan, data = Plan.from_json(text), json.loads(text)
    plan.check(tensor.name for tensor in builtin("resnet50").tensors)
    assert data["method"] == data["ranking"]["best"].partition(":")[0]
    assert isinstance(data["options"], dict)
    size = {tensor.name: tensor.size * 4 for tensor in builtin("resnet50").tensors}
    assert answer["ddp"] == {"label": answer["ranking"]["best"], "arguments": bucket_arguments(plan, size)}
    if has_bucket_list():
        caps = answer["ddp"]["arguments"]["bucket_cap_mb_list"]
        assert sum(caps) * 2**20 == sum(size.values())
        assert len(caps) == len(plan.buckets())


def saved(path, workers=4, provenance="measured here", **more):
    costs = Costs.of_link(1e9, 1e-4, workers, 2)
    exchanges = {k: Linear(c.startup_seconds, c.seconds_per_byte, provenance) for k, c in costs.exchanges.items()}
    path.write_text(Costs(exchanges, **more).to_json())


def test_measured_costs(tmp_path):
    saved(tmp_path / "costs.json")
    found = as_json("resnet50", "--costs", "costs.json", *FEW)
    asked = found["question"]
    assert (asked["workers"], asked["ranks_per_node"], asked["network"]) == (4, 2, "measured")
    assert 0 < found["ranking"]["measured_share"] < 1
    assert "network measured" in " ".join(run("resnet50", "--costs", "costs.json", *FEW).split())
    wider = as_json("resnet50", "--costs", "costs.json", "--workers", "32", "--ranks-per-node", "2", *FEW)
    assert wider["ranking"]["measured_share"] < found["ranking"]["measured_share"]
    saved(tmp_path / "costs.json", compute={"select": Linear(1.0, 0.0, "measured here")})
    found = as_json("resnet50", "--costs", "costs.json", "--link", "10gbit", "--delay", "20us", *FEW)
    assert (found["question"]["network"], found["question"]["workers"]) == ("assumed", 16)
    assert next(e for e in found["ranking"]["entries"] if e["label"] == "topk:density=0.01")["step_seconds"] > 1


@pytest.mark.parametrize(
    "words", [["saved.json"], ["--profile", "saved.json"], ["resnet50", "--profile", "saved.json"]]
)
def test_a_saved_profile(tmp_path, words):
    (tmp_path / "saved.json").write_text(builtin("resnet50", batch_size=1).to_json())
    asked = as_json(*words, *FEW)["question"]
    assert asked["model"] == "resnet50"
    assert asked["device"] == "cpu"
    assert "1 samples" in asked["model_source"]


def test_a_model_is_measured():
    found = as_json("mlp:width=16:layers=2", "--workers", "2", "--methods", "acp:rank=2")
    assert found["question"]["model_provenance"] == "measured here"
    assert found["ranking"]["entries"][0]["measured_share"] > 0


def test_a_model_is_measured_with_a_ranks_share_of_the_cores_and_its_fastest_repeat_counts(monkeypatch):
    shares = []

    def profiled(*args, name, **options):
        shares.append(torch.get_num_threads())
        return builtin("resnet50", batch_size=1).scaled(3.0 - len(shares) if len(shares) < 3 else 5.0)

    monkeypatch.setattr(plan_inputs, "usable_cores", lambda: 7)
    monkeypatch.setattr(measure, "profile_model", profiled)
    before = torch.get_num_threads()
    asked = PlanOptions(model="mlp:width=16:layers=2", workers=3)
    found = plan_inputs.read_question(asked).profile
    assert shares == [2, 2, 2]
    assert torch.get_num_threads() == before
    assert found.forward_seconds == builtin("resnet50", batch_size=1).forward_seconds


def test_a_busy_machine_is_the_first_line_of_the_answer(monkeypatch):
    monkeypatch.setattr(machine.LoadSample, "load", lambda self: machine.Load(2, 30.0, 31.0, 0.0, 0, 0))
    words = ["mlp:width=16:layers=2", "--workers", "2", "--methods", "acp:rank=2"]
    first = run(*words).lstrip().splitlines()[0]
    assert first == "unreliable: this machine was busy while the model was measured"
    assert not run("resnet50", *FEW).startswith("unreliable")


@pytest.mark.slow
def test_what_ddp_cannot_run_is_passed_over():
    """Decoupled methods, and plans that keep vectors apart."""
    text = " ".join(run("resnet50", "--methods", "dear,topk:density=0.001").split())
    assert "or with DDP: bucket_cap_mb" in text
    assert "*tw.ddp_hook(" in text
    assert 'ddp_hook("dear"' not in text
    assert 'ddp_hook("topk"' not in text


def test_a_line_to_paste():
    answer = {"label": "acp:rank=4", "arguments": {"bucket_cap_mb_list": [0.5, 12.25]}}
    assert ddp_sentence(answer) == (
        'or with DDP: bucket_cap_mb_list=[0.5, 12.25], and model.register_comm_hook(*tw.ddp_hook("acp", rank=4))'
    )
    assert "bucket_cap_mb=7.5, and" in ddp_sentence({"label": "ssgd", "arguments": {"bucket_cap_mb": 7.5}})
    long = ddp_sentence({"label": "ssgd", "arguments": {"bucket_cap_mb_list": [1.0] * 40}})
    assert "[" + "1, " * 12 + "... 28 more in --json]" in long


def loss_seconds(found):
    return {e["label"]: e["step_seconds"] * (e["steps"] or math.inf) for e in found["ranking"]["entries"]}


def test_the_first_line_is_the_answer_with_its_worth_and_its_ground():
    words = ("resnet50", "--link", "1gbit", "--workers", "4")
    line, data = " ".join(run(*words).split("\nresnet50, ")[0].split()), as_json(*words)
    found = re.fullmatch(
        r"use local: 4 workers reach the loss ([\d.]+) times as soon as one alone \(DDP: ([\d.]+)\), "
        r"predicted for an assumed network and a100; race it",
        line,
    )
    assert found, line
    assert data["answer"] == line
    seconds = loss_seconds(data)
    worth = {label: seconds["alone"] / taken for label, taken in seconds.items()}
    best, ddp = worth[data["ranking"]["answer"]], worth["ssgd"]
    assert (float(found[1]), float(found[2])) == pytest.approx((best, ddp), rel=0.01)
    assert best == max(worth.values()) > PAYS
    for entry in data["ranking"]["entries"]:
        known = entry["steps"] is not None
        assert entry["worth"] == (pytest.approx(worth[entry["label"]]) if known else None)
    exact = as_json("resnet50", "--link", "400gbit", "--workers", "4", *FEW)
    seconds = loss_seconds(exact)
    said = rf"use ssgd: 4 workers reach the loss {seconds['alone'] / seconds['ssgd']:.1f} times as soon as one alone, "
    assert exact["answer"].startswith(f"{said}predicted for an assumed network")
    assert as_json("resnet50", "--workers", "1")["answer"].startswith("one worker: nothing is sent")


def test_what_keeps_equal_weights_is_named_beside_local_steps():
    text = " ".join(run("resnet50", "--link", "1gbit", "--workers", "4").split())
    assert re.search(r"if weights must be equal after every step: acp:rank=32, [\d.]+ ms x [\d.]+ steps", text)


@pytest.fixture
def small(tmp_path):
    """A profile of 0.1 million parameters, which compute for 2 ms."""
    tensors = tuple(TensorTime(f"{i}.weight", (256, 128), 4e-4) for i in range(3))
    (tmp_path / "small.json").write_text(ModelProfile("small", tensors, 8e-4).to_json())
    return "small.json"


def test_where_one_worker_alone_is_sooner_than_all_methods_the_answer_says_so(small):
    words = (small, "--link", "1mbit", "--workers", "4", "--methods", "local:codec=int2,powersgd:rank=4")
    text, found = " ".join(run(*words).split()), as_json(*words)
    seconds = loss_seconds(found)
    assert min(seconds, key=seconds.get) == found["ranking"]["answer"] == "alone"
    assert text.startswith(found["answer"])
    said = re.match(
        r"use one worker alone, or a faster wire \(from (\w+) on local int2 is worth ([\d.]+)\): 4 workers are worth "
        r"([\d.]+) of one here with local codec=int2 \(DDP: ([\d.]+)\), predicted for ",
        text,
    )
    assert said, text
    worth = [seconds["alone"] / seconds[label] for label in ("local:codec=int2", "ssgd")]
    assert [float(said[3]), float(said[4])] == pytest.approx(worth, rel=0.05)
    fast = loss_seconds(as_json(small, "--link", said[1], *words[3:]))  # that wire pays
    assert fast["alone"] / fast["local:codec=int2"] == pytest.approx(float(said[2]), rel=0.05)
    assert float(said[2]) >= PAYS
    slower = max(rate for rate in FASTER if format_rate(int(rate)) != said[1] and rate < parse_rate(said[1]))
    slow = as_json(small, "--link", format_rate(int(slower)), *words[3:])  # and no slower one does
    assert max(entry["worth"] or 0.0 for entry in slow["ranking"]["entries"]) < PAYS
    assert "next: train on one machine; nothing has to be attached" in text
    assert "tw.attach" not in text  # what takes a thousand times as long
    assert "or with DDP" not in text
    assert run(*words, "--no-lossy").startswith("use one worker alone")


def test_names_that_the_table_prints_are_methods():
    entries = as_json("resnet50", "--link", "1gbit", "--workers", "4")["ranking"]["entries"]
    labels = {entry["label"] for entry in entries}
    again = as_json("resnet50", "--link", "1gbit", "--workers", "4", "--methods", ",".join(labels))["ranking"]
    assert {entry["label"] for entry in again["entries"]} == labels
    assert {entry["label"]: entry for entry in again["entries"]} == {entry["label"]: entry for entry in entries}
    (eighth,) = (method for label, method in read_methods("accumulate:every=8")[0] if label == "accumulate:every=8")
    assert eighth.every == 8


def test_one_worker_alone_does_not_keep_weights_equal(small):
    words = (small, "--link", "100mbit", "--workers", "4", "--methods", "local:codec=int2,powersgd:rank=4")
    text = " ".join(run(*words).split())
    assert text.startswith("use local codec=int2: ")
    assert "if weights must be equal after every step: powersgd:rank=4, " in text


def test_a_question_mark_is_explained_below_the_table():
    said = "?: how many steps it needs is not known, so it is not recommended"
    assert said in " ".join(run("resnet50", "--methods", "topk:density=0.01").split())
    assert said not in " ".join(run("resnet50", "--methods", "cast:dtype=int8").split())
