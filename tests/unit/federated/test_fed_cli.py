"""The verbs: a run from start to end, JSON, sentences for what is wrong."""

import json

import pytest
import torch
from fed_calls import MINE, SMALL, call

from thinwire.systems.federated import Compressed, FedAvg, FedOpt, History, Scaffold
from thinwire.systems.federated.builtin import build_algorithm
from thinwire.systems.federated.state import unpack


def test_a_run_with_everything(alone):
    (alone / "trace.json").write_text('[{"seconds_per_sample": 0.5}]')
    done = call(
        *SMALL, "--algorithm", "fedopt:rule=yogi:server_lr=0.1", "--compress", "topk:density=0.1", "--devices", 2,
        "--schedule", "lpt", "--reduction", "exact", "--evaluate-every", 1, "--checkpoint-dir", "run",
        "--trace", "trace.json",
        "--out", "weights.safetensors", "--plot", "curves.html", "--json", code=0,
    )  # fmt: skip
    history = History.from_json(done.stdout)
    assert history.about["algorithm"] == "Compressed"
    assert [row.clients for row in history.rounds] == [4, 4]
    assert all(row.client_seconds > 1 and "accuracy" in row.evaluation for row in history.rounds)
    assert {x.shape[0] for x in unpack((alone / "weights.safetensors").read_bytes()).values()} >= {10}
    assert "plotly" in (alone / "curves.html").read_text()


def test_what_is_not_named_is_kept_of_the_federation():
    base = FedAvg(lr=0.2, epochs=5, batch_size=None, weight_decay=0.01, server_lr=0.5)
    assert build_algorithm("fedavg:lr=0.3", base) == FedAvg(
        lr=0.3, epochs=5, batch_size=None, weight_decay=0.01, server_lr=0.5
    )
    assert build_algorithm("scaffold:epochs=1", base) == Scaffold(
        lr=0.2, epochs=1, batch_size=None, weight_decay=0.01, server_lr=0.5, max_grad_norm=1.0
    )
    assert build_algorithm("scaffold:max_grad_norm=none", base).max_grad_norm is None
    assert build_algorithm("fedopt", base).server_lr == 0.02  # a rate of FedAvg's server says nothing of Adam's
    assert build_algorithm("fedopt:rule=sgd", base).server_lr == 0.5
    assert build_algorithm("fedavg", FedOpt(server_lr=0.03, lr=0.4)) == FedAvg(lr=0.4)
    squeezed = build_algorithm("fedprox", Compressed(base, "topk", density=0.1))
    assert (squeezed.inner.epochs, squeezed.method.density) == (5, 0.1)
    assert build_algorithm("fedprox", squeezed, "topk:density=0.2").method.density == 0.2


def test_options_that_are_kept_and_do_not_go_together_are_named():
    with pytest.raises(ValueError, match=r"leave momentum= out \(not named, so kept: .*momentum=0.9.*scaffold:lr"):
        build_algorithm("scaffold", FedAvg(momentum=0.9))
    assert build_algorithm("scaffold:momentum=0", FedAvg(momentum=0.9)).momentum == 0


def test_what_is_printed(alone):
    more = ["--compress", "topk:density=0.1", "--plot", "curves.png"]
    done = call(*SMALL, "--algorithm", "fedprox:mu=0.25", *more, code=0)
    words = " ".join(done.stdout.split())
    assert words.startswith("FedProx with lr=0.2, epochs=5, batch_size=10, server_lr=1.0, weights=samples, mu=0.25;")
    assert "changes compressed by topk with density=0.1" in words
    assert "after 2 rounds: training loss" in words
    assert "4 of 12 clients a round" in done.stdout
    assert "its clients, each on its own" in done.stdout
    assert (alone / "curves.png").stat().st_size > 1000


def test_a_federation_of_ones_own(alone):
    (alone / "mine_to_run.py").write_text(MINE)
    done = call("federated", "run", "mine_to_run:build:lr=0.5", "--json", "--seed", 3, code=0)
    assert json.loads(done.stdout)["about"] | {"lr": 0.5, "seed": 3} == json.loads(done.stdout)["about"]


def test_prediction(alone):
    (alone / "devices.json").write_text(json.dumps([{"seconds_per_sample": s} for s in (0.01, 0.01, 0.05)]))
    words = ["federated", "predict", "--clients", 60, "--clients-per-round", 24]
    done = call(*words, "--devices", "devices.json", "--json", code=0)
    rows = {row["schedule"]: row for row in json.loads(done.stdout)}
    assert rows["pull"]["ratio"] < rows["equal"]["ratio"]
    assert min(row["ratio"] for row in rows.values()) >= 1
    bounds = [row["seconds"] / row["ratio"] for row in rows.values()]  # one bound for all: the columns agree
    assert bounds == pytest.approx([sum(rows["lpt"]["bound_seconds"]) / 50] * 4)
    assert rows["lpt"]["seconds"] == pytest.approx(sum(rows["lpt"]["round_seconds"]) / 50)
    assert "to the bound" in call(*words).stdout


def test_a_deployment_whose_result_cannot_be_written_does_not_begin(alone):
    (alone / "file").write_text("")
    assert "--out file/deployed is not a folder that can be written" in call(
        "federated", "serve", "digits_clients:build", "--out", "file/deployed", code=2
    ).output.replace("\n", " ")


def test_a_run_that_fails_is_a_sentence(alone):
    (alone / "mine_that_fails.py").write_text(MINE.replace("return x, (x.sum(1) > 0).long()", "raise OSError('gone')"))
    done = call("federated", "run", "mine_that_fails:build", code=1)
    assert "all 3 clients of round 0 failed" in done.output
    assert torch.get_num_threads() == 1
