import json
from pathlib import Path

import pytest

from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.predict.measure import ProbeResult
from thinwire.predict.measure.machine import Load
from thinwire.systems.supernet.stereo import LatencyTable
from verbs import call

SMALL = "mlp:width=16:layers=2"


def test_profile(tmp_path):
    result = call("profile", SMALL, "--steps", "2", "--warmup", "1")
    assert "next: thinwire probe, then thinwire plan profile.json" in result.stdout.replace("\n", " ")
    profile = ModelProfile.from_json((tmp_path / "profile.json").read_text())
    assert [t.module for t in profile.tensors] == ["4", "4", "2", "2", "0", "0"]
    assert [m.name for m in profile.modules] == ["0", "1", "2", "3", "4"]
    assert "batch 8" in profile.source


def test_profile_of_ones_own_model_as_json(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(4, 4), lambda model, step, rank: model(torch.ones(1, 4)).sum()\n"
    )
    result = call("profile", "my_net:build", "--steps", "1", "--warmup", "0", "--json")
    assert ModelProfile.from_json(result.stdout).name == "my_net:build"
    loads = [json.loads(text)["load"] for text in (result.stdout, (tmp_path / "profile.json").read_text())]
    assert loads[0] == loads[1]
    assert set(loads[0]) == {"cores", "before", "after", "stolen", "throttled", "periods"}


@pytest.mark.slow
@pytest.mark.dist
def test_profile_of_two_processes_at_once(tmp_path):
    result = call("profile", SMALL, "--steps", "2", "--warmup", "1", "--workers", "2", "--json")
    assert "2 processes at once" in ModelProfile.from_json(result.stdout).source
    assert ModelProfile.from_json((tmp_path / "profile.json").read_text()).elements == 2 * (16 * 16 + 16) + 16 * 10 + 10


@pytest.mark.dist
@pytest.mark.slow
def test_probe_on_two_ranks(tmp_path):
    result = call("probe", "--max-bytes", "8192", "--seconds", "0.5", "--json")
    found = ProbeResult.from_json(result.stdout)
    assert json.loads(result.stdout)["load"]["cores"] >= 1
    assert found.layout == (1, 1)
    costs = Costs.from_json((tmp_path / "costs.json").read_text())
    assert costs.hash == found.costs.hash
    assert {key[1:] for key in costs.exchanges} == {("world", 2)}


BUSY = "this machine is overloaded: load average 9.0 on 2 cores before the start"


@pytest.fixture
def busy(monkeypatch):
    monkeypatch.setattr("thinwire.predict.measure.machine.LoadSample.load", lambda self: Load(2, 9.0, 9.0, 0.0, 0, 0))


BERT = ["--model", "bert:layers=1:hidden=16:heads=2", "--lines", "20", "--length", "8", "--batch-size", "8"]


@pytest.mark.parametrize(
    "words",
    [
        ["profile", SMALL, "--steps", "1", "--warmup", "0"],
        ["plan", SMALL],
        ["kfac", "plan", SMALL],
        ["kfac", "tune", SMALL, "--dampings", "0.03", "--rates", "0.1", "--steps", "2"],
        ["kfac", "calibrate", "--largest", "64", "--seconds", "0.01"],
        ["split", "plan", *BERT, "--measure", "2"],
        ["split", "compare", *BERT, "--epochs", "1", "--plans", "lowrank"],
        ["supernet", "table", "--config", "tiny", "--size", "24x48", "--repeats", "1", "--out", "table.json"],
        pytest.param(
            ["ps", "run", "--model", "mlp:width=16:layers=1", "--nodes", "1", "--updates", "2"],
            marks=[pytest.mark.slow, pytest.mark.dist],
        ),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_whatever_measures_on_a_busy_machine_says_so(words, busy):
    result = call(*words, "--json")
    assert result.stderr.count(BUSY) == 1
    found = json.loads(result.stdout)
    assert found.get("question", found)["load"]["before"] == 9.0
    if (table := Path("table.json")).exists():
        assert LatencyTable.from_json(table.read_text()).size == (24, 48)


@pytest.mark.parametrize("words", [["plan", "resnet50"], ["split", "plan", *BERT, "--measure", "0"]])
def test_what_measures_nothing_does_not(words, busy):
    result = call(*words, "--json")
    assert BUSY not in result.stderr
    found = json.loads(result.stdout)
    assert not found.get("question", found).get("load")
