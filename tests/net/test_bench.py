"""A real comparison over an emulated link: the bytes that were counted are those of the formula."""

import json
import re

import pytest

from thinwire.tools.cli.main import app
from verbs import CliRunner, call

pytestmark = pytest.mark.net
PAYLOAD = 4 * (256 * 256 * 2 + 256 * 2 + 256 * 10 + 10)  # of the model below; two ranks each send it once


def bench(*words):
    words = ("--model", "mlp:width=256:layers=2", "--link", "100mbit", "--steps", 4, "--rounds", 1, *words)
    return json.loads(call("bench", *words, "--json").stdout)


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_formula(any_mode):
    methods = "ddp,ddp-best:buckets=1,ssgd,cast,torch-powersgd,acp:rank=2"
    result = bench("--methods", methods)
    rows = {row["label"]: row for row in result["rows"]}
    assert not [row["error"] for row in rows.values() if row["error"]]
    assert {row["bytes_source"] for row in rows.values()} == {"interface"}
    for label, share in (("ddp", 1.0), ("ssgd", 1.0), ("cast", 0.5)):
        assert rows[label]["bytes_per_step"] == pytest.approx(share * PAYLOAD, rel=0.08), label
    assert rows["acp rank=2"]["bytes_per_step"] < 0.1 * PAYLOAD
    assert rows["compute"]["bytes_per_step"] < 0.01 * PAYLOAD
    assert result["floor_seconds"] >= PAYLOAD * 8 / 100e6
    assert rows["ssgd"]["step_seconds"] > 0.8 * result["floor_seconds"]
    assert rows["ddp"]["loss"] == pytest.approx(rows["ssgd"]["loss"], rel=1e-4)
    assert rows["ddp"]["speedup"] == 1.0
    assert re.search(r", TCP with \w+$", result["note"])


@pytest.mark.slow
def test_without_rights_the_bytes_are_labelled_otherwise(monkeypatch):
    monkeypatch.setenv("THINWIRE_LAB_MODE", "loopback")
    result = bench("--methods", "ddp,ssgd")
    assert result["emulated"] is False
    assert {row["label"]: row["bytes_source"] for row in result["rows"]} == {
        "compute": "formula",
        "ddp": "formula",
        "ssgd": "stats",
    }
    assert result["rows"][2]["bytes_per_step"] == pytest.approx(PAYLOAD, rel=0.01)


@pytest.mark.slow
def test_a_row_that_fails_is_in_the_table_and_the_others_go_on(tmp_path, monkeypatch):
    (tmp_path / "fails_late.py").write_text(
        "import torch\n"
        "def build():\n"
        "    def loss(model, step, rank):\n"
        "        if step == 2 and rank == 1 and hasattr(model, 'module'):\n"
        "            raise ArithmeticError('as planned')\n"
        "        return model(torch.ones(1, 4)).sum()\n"
        "    return torch.nn.Linear(4, 4), loss\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["bench", "--model", "fails_late:build", "--steps", "2", "--rounds", "2", "--json", "--methods", "ddp,ssgd"]
    for seconds in ("20", "90"):  # a very busy machine may keep a live rank as long as the shorter one
        result = CliRunner().invoke(app, [*words, "--operation-timeout", seconds])
        if result.exit_code == 0:
            break
    rows = {row["label"]: row for row in json.loads(result.stdout)["rows"]}
    assert result.exit_code == 0
    assert rows["ddp"]["error"]
    assert not rows["ssgd"]["error"]
