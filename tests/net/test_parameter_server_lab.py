"""``thinwire ps run`` over emulated links: a slow node, a kill, a journal that is replayed, bytes on the wire."""

import json
import shutil

import pytest

from thinwire.systems.link.keys import new_keys
from thinwire.tools.cli.main import app
from verbs import CliRunner

pytestmark = [pytest.mark.net, pytest.mark.slow]


def call(*words):
    result = CliRunner().invoke(app, ["ps", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_slow_node_and_a_killed_one_do_not_end_the_training(tmp_path):
    words = ["--model", "mlp:width=64:layers=2", "--nodes", "3", "--slow", "2:4", "--kill", "1:9", "--pace", "0.05"]
    words += ["--link", "100mbit", "--outer", "sgd:lr=0.05", "--journal", str(tmp_path / "j"), "--seconds", "20"]
    result = call("run", *words, "--settings", "inhad:max_staleness=4:deterministic=true")
    status = result["status"]
    assert status["counters"]["joined"] == 4
    assert status["max_staleness"] <= 4
    assert status["gradients"] > 100
    again = call("replay", str(tmp_path / "j"))
    assert again["updates"] == status["version"]
    assert again["hash"] == result["weights"]


def test_bytes_on_the_wire_are_those_that_are_counted():
    words = ["--model", "mlp:width=256:layers=2", "--nodes", "2", "--link", "200mbit", "--updates", "30"]
    result = call("run", *words, "--settings", "bsp", "--outer", "sgd:lr=0.01")
    status = result["status"]
    parameters = 2 * (256 * 256 + 256) + 256 * 10 + 10
    counted = status["up_bytes"] + status["down_bytes"]
    assert counted == pytest.approx(2 * 4 * parameters * (status["gradients"] + 2), rel=0.05)
    if sum(result["node_bytes"]["sent"]):
        on_wire = result["node_bytes"]["sent"][0] + result["node_bytes"]["received"][0]
        assert on_wire == pytest.approx(counted, rel=0.1)


def test_keys_change_no_bit_and_who_has_none_of_them_is_told(tmp_path):
    words = ["--model", "mlp:width=64:layers=2", "--nodes", "2", "--link", "100mbit", "--updates", "20"]
    words += ["--settings", "bsp:deterministic=true", "--outer", "sgd:lr=0.05", "--workers", "2", "--shards", "1"]
    names, keys = ["server", "shard0", "node0", "node1"], tmp_path / "keys"
    new_keys(keys, names, ["10.77.0.1"])
    shown = call("run", *words, "--keys", str(keys))
    assert shown["weights"] == call("run", *words)["weights"]
    new_keys(tmp_path / "others", names, ["10.77.0.1"])
    shutil.copytree(tmp_path / "others" / "node1", keys / "node1", dirs_exist_ok=True)
    refused = CliRunner().invoke(app, ["ps", "run", *words, "--keys", str(keys)])
    assert refused.exit_code == 1
    assert "[3] error: " in refused.output
    assert "another authority signed it" in refused.output


def test_shards_with_links_of_their_own_end_with_the_same_bits():
    words = ["--model", "mlp:width=64:layers=2", "--nodes", "2", "--link", "100mbit", "--updates", "20"]
    words += ["--settings", "bsp:deterministic=true", "--outer", "sgd:lr=0.05:momentum=0.9"]
    whole, sliced = call("run", *words), call("run", *words, "--shards", "2")
    assert whole["weights"] == sliced["weights"]
    rows = sliced["status"]["shards"]
    assert abs(rows[0]["up_bytes"] - rows[1]["up_bytes"]) <= 2 * 20 * 8
    if sum(sliced["node_bytes"]["sent"]):
        assert sliced["node_bytes"]["received"][1] == pytest.approx(rows[0]["up_bytes"], rel=0.1)
