import json
import socket

import pytest
from rich.console import Console

from thinwire.systems.cli.split import compare_table, read_rows
from thinwire.systems.link.keys import new_keys
from thinwire.systems.split.finetune import ComparisonRow
from thinwire.systems.split.surgery import read_facts
from thinwire.systems.split.tasks import Task, TextData
from thinwire.tools.cli.main import app
from verbs import CliRunner

runner = CliRunner()
SMALL = ["--model", "bert:layers=2:hidden=32:heads=2", "--lines", "60", "--length", "16", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run(*words, code=0):
    result = runner.invoke(app, ["split", *words])
    assert result.exit_code == code, result.output
    return result


def refused(says, *words, code=2):
    result = run(*words, code=code)
    *before, last = result.stderr.strip().splitlines()
    assert last.startswith("error: "), result.stderr
    assert says in last
    assert bool(before) == (code == 1)  # a run that began has said what it does


def test_plan_writes_both_halves_and_says_what_a_step_costs(tmp_path):
    words = ["plan", *SMALL, "--rank", "4", "--link", "10mbit", "--up", "int8,pack", "--down", "int8", "--epochs", "1"]
    answer = json.loads(run(*words, "--measure", "1", "--out", "halves", "--json").stdout)
    names = list(answer["rows"])
    assert names == ["boundary", "ffn", "lowrank r=4, up int8,pack, down int8"]
    plain, wide, thin = answer["rows"].values()
    assert wide["wire"] > plain["wire"] > thin["wire"]
    assert thin["messages"] == 4
    assert thin["step_seconds"] == pytest.approx(thin["compute_seconds"] + thin["link_seconds"])
    assert plain["provenance"] == "measured here"
    for role in ("edge", "cloud"):
        facts = read_facts(tmp_path / "halves" / f"{role}.safetensors")
        assert (facts["role"], facts["pair"]) == (role, answer["pair"])
        assert facts["notes"]["recipe"]["batch_size"] == 16
    shown = run("plan", *SMALL, "--measure", "0", "--labels", "cloud")
    assert "1/1.0" in shown.stdout
    assert "the labels leave the edge" in shown.stderr


def test_plan_with_calibration_and_a_glue_task(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "a fine film\t1\na bad film\t0\n" * 20)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na film\t1\n")
    words = ["plan", "--model", "distilbert:layers=1:hidden=16:heads=2", "--task", "sst2", "--data", "."]
    more = ["--batch-size", "8", "--init", "activation", "--residual", "lowrank:2", "--rank", "4"]
    answer = json.loads(run(*words, *more, "--measure", "1", "--out", "halves", "--json").stdout)
    assert answer["plan"]["init"] == "activation"


def test_the_front_in_the_cloud(tmp_path):
    words = ["plan", *SMALL, "--front-on", "cloud", "--rank", "4", "--measure", "0", "--out", "halves", "--json"]
    shown = run(*words, "--up", "int8", "--down", "delta:4,pack")
    assert "the inputs (token ids) leave the edge" in shown.stderr
    answer = json.loads(shown.stdout)
    assert answer["plan"]["front_on"] == "cloud"
    assert [(row["messages"], row["payload"]["ids"] > 0) for row in answer["rows"].values()] == [(4, True)] * 3
    assert json.loads(read_facts(tmp_path / "halves" / "edge.safetensors")["plan"])["front_on"] == "cloud"
    rows = read_rows("boundary lowrank:delta:4,pack", 1, 4, "cloud")
    assert [(row.up, row.down) for row in rows.values()] == [((), ()), (("int8", "pack"), ("delta:4", "pack"))]


def test_what_takes_long_says_first_what_it_begins(tmp_path):
    words = ["--epochs", "1", "--rank", "4"]
    plan = run("plan", *SMALL, *words, "--measure", "0", "--out", "halves").stderr.splitlines()
    assert plan == ["... reading task stdlib", f"... cutting {SMALL[1]}"]
    compared = run("compare", *SMALL, *words, "--plans", "boundary lowrank:int8,pack", "--json")
    assert compared.stderr.splitlines()[:2] == [plan[0], f"... training {SMALL[1]} with and without cuts"]
    rows = json.loads(compared.stdout)["rows"]
    assert [row["name"] for row in rows] == ["unsplit", "boundary", "lowrank:int8,pack"]
    assert all(0 <= row["score"] <= 1 for row in rows)
    edge = run("edge", "halves", "--cloud", "127.0.0.1:9", "--reconnect", "0", code=1).stderr.splitlines()
    assert [edge[0], edge[-2]] == [plan[0], "... the edge's half of BertForSequenceClassification"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begins, ends = run("cloud", "halves", "--listen", f"127.0.0.1:{port}", code=2).stderr.strip().splitlines()
    assert begins == "... the cloud's half of BertForSequenceClassification"
    assert "cannot listen at 127.0.0.1" in ends


def test_the_table_of_a_comparison():
    task = Task("t", TextData([], []), TextData([], []), 2, 9, "accuracy", "a task")
    rows = [
        ComparisonRow("unsplit", (0.5, 0.7), None, None, 0.1, 0.1),
        ComparisonRow("boundary", (0.5, 0.6), 1000.0, 1100.0, 0.1, 0.5),
        ComparisonRow("thin", (0.4, 0.6), 100.0, 200.0, 0.1, 0.2),
    ]
    console = Console(width=100, record=True)
    console.print(compare_table(rows, task, "10mbit up, 50mbit down", 2))
    text = console.export_text()
    for words in ("a task; 10mbit up, 50mbit down; 2 seeds", "0.6000 ±0.1414", "1/10.0", "1/5.5", "0.20"):
        assert words in text


def test_wrong_addresses_keys_and_shares(tmp_path):
    run("plan", *SMALL, "--measure", "0", "--out", "halves")
    refused("is not a host:port", "edge", "halves", "--cloud", "somewhere")
    refused("host 'no..name' is neither a name nor an address", "edge", "halves", "--cloud", "no..name:7443")
    refused(
        "whoever reaches 10.0.0.1 could",
        "edge",
        "halves",
        "--cloud",
        "10.0.0.1:7443",
    )
    refused("whoever reaches 0.0.0.0 could", "cloud", "halves", "--listen", "0.0.0.0:7443")
    refused("certificate: keys/identity.crt cannot be read", "edge", "halves", "--keys", "keys")
    refused("give --keys too", "edge", "halves", "--fingerprint", "00")
    refused("share '5/4' is not a part", "edge", "halves", "--share", "5/4")
    refused("share '¹/4' is not a part", "edge", "halves", "--share", "¹/4")
    refused("is the half of the edge", "cloud", "halves/edge.safetensors")
    refused("no connection with 127.0.0.1", "edge", "halves", "--cloud", "127.0.0.1:9", "--reconnect", "0", code=1)
    new_keys("keys", ["cloud"])
    (tmp_path / "keys" / "cloud" / "identity.key").write_text("spoiled")
    refused("do not fit together", "cloud", "halves", "--keys", "keys/cloud")
