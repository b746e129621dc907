"""``thinwire ps run`` over emulated links: a slow node, a kill, a journal that is replayed, bytes on the wire."""

import json

import pytest

from verbs import call

pytestmark = [pytest.mark.net, pytest.mark.slow]


def ps(*words):
    return json.loads(call("ps", *words, "--json").stdout)


def test_a_slow_node_and_a_killed_one_do_not_end_the_training(tmp_path):
    words = ["--model", "mlp:width=64:layers=2", "--nodes", "3", "--slow", "2:4", "--kill", "1:9", "--pace", "0.05"]
    words += ["--link", "100mbit", "--outer", "sgd:lr=0.05", "--journal", str(tmp_path / "j"), "--seconds", "40"]
    result = ps("run", *words, "--settings", "inhad:max_staleness=4:deterministic=true")
    status = result["status"]
    assert status["counters"]["joined"] == 4
    assert status["max_staleness"] <= 4
    assert status["gradients"] > 100
    again = ps("replay", tmp_path / "j")
    assert again["updates"] == status["version"]
    assert again["hash"] == result["weights"]


def test_local_steps_go_on_past_a_slow_node_and_a_killed_one(tmp_path):
    words = ["--model", "digits", "--nodes", "3", "--slow", "2:4", "--kill", "1:5", "--pace", "0.02"]
    words += ["--link", "100mbit", "--updates", "150", "--evaluate-every", "10", "--journal", str(tmp_path / "j")]
    result = ps("run", *words, "--settings", "local:sync_every=8:codec=int2")
    status, losses = result["status"], [loss for *_, loss in result["losses"]]
    assert (status["version"], status["counters"]["joined"], status["loss"]) == (150, 4, None)
    assert status["gradients"] > 300
    assert losses[-1] < 0.5 * losses[0]
    assert [what for *_, what in result["happened"]] == ["killed", "started again"]
    refused = call("ps", "replay", tmp_path / "j", code=2)
    assert "is of local steps" in refused.output


def test_bytes_on_the_wire_are_those_that_are_counted():
    words = ["--model", "mlp:width=256:layers=2", "--nodes", "2", "--link", "200mbit", "--updates", "30"]
    result = ps("run", *words, "--settings", "bsp", "--outer", "sgd:lr=0.01")
    status = result["status"]
    parameters = 2 * (256 * 256 + 256) + 256 * 10 + 10
    counted = status["up_bytes"] + status["down_bytes"]
    assert counted == pytest.approx(2 * 4 * parameters * (status["gradients"] + 2), rel=0.05)
    if sum(result["node_bytes"]["sent"]):
        on_wire = result["node_bytes"]["sent"][0] + result["node_bytes"]["received"][0]
        assert on_wire == pytest.approx(counted, rel=0.1)
